"""`dlctl-hosts(7)`: from one machine to three."""

from __future__ import annotations

from dlctl.cli.roff import Page

STEPS = [
    (
        "1. ssh without a question",
        "From the machine where you type, `ssh gpu1 true` has to work without a password or any "
        "other question: with a key (`ssh-copy-id gpu1`), and after one login by hand, so that "
        "the host's key is known. Aliases, users, ports and jump hosts belong into "
        "~/.ssh/config; dlctl uses your ssh with your configuration.",
    ),
    (
        "2. the same dlctl everywhere",
        "Install the same version of dlctl, and torch, on every host: best at the same path as "
        "here, for example in a virtual environment of the same name. Where it is elsewhere, say "
        "so with python in [[hosts]]. `start` refuses other versions, and says which is where.",
    ),
    (
        "3. the data",
        "The Python files beside the job file are sent to the hosts; data is not. The dataset has "
        "to be on every host that has workers, or to be loaded by the task. The working directory "
        "of a task there is your home directory: give full paths, or paths below ~.",
    ),
    (
        "4. the hosts in the job file",
        "One section [[hosts]] per machine, as in EXAMPLES. Servers and workers are spread evenly "
        "over them, unless a host says how many it takes. This machine takes part only if it is "
        "listed, by a section without ssh; the coordinator runs here in any case. A host with "
        "larger or smaller GPUs may have a `batch_size` of its own.",
    ),
    (
        "5. is anything in the way?",
        "`dlctl doctor job.toml` logs in everywhere and looks at versions, directories, shared "
        "memory, limits, clocks, addresses and ports; it connects the hosts as the job will, "
        "through their firewalls, and measures how far and how fast that is. Behind everything "
        "that is wrong stands how to mend it. `dlctl plan job.toml` shows who will run where.",
    ),
    (
        "6. start",
        "`dlctl start job.toml`. Everything else is as on one machine: `status`, `logs -f`, `set`, "
        "`scale`, `checkpoint`, `stop`. Logs and checkpoints are collected in the run directory "
        "here; after an orderly end nothing is left on the hosts.",
    ),
]
ADDRESSES = (
    "Daemons of other hosts connect to a host at its `data` address; without it, at the address "
    "from which it reaches the coordinator. Give `data` if there is a faster network card, and "
    "`bind` if the address that others see is not one of the machine's own. The coordinator is "
    "reached at `address` in [network], else at the address from which this machine reaches the "
    "first host. Ports are free ones, unless `port` in [network] is given: then the coordinator "
    "has this one and server-0, server-1 ... the ones after it. These have to be open in the "
    "firewalls: that of the coordinator for all hosts, those of the servers for hosts with "
    "workers. `dlctl doctor` tries them all, and tells a firewall from a wrong address. Workers "
    "listen only if their method lets replicas ask each other: worker-0, worker-1 ... take the "
    "ports behind those of the servers, which have to be open for hosts with workers; `dlctl "
    "doctor` does not try these."
)
AWAY = (
    "A daemon that dies is started again where it was. A host that cannot be reached is waited "
    "for; what runs there goes on, as long as it reaches the servers. After `host_s` in [timeouts] "
    "it is given up: its workers are started on the other hosts. A shard is on its host only, so "
    "without the host of a server the run fails. When the host is back, `dlctl recover` asks all "
    "hosts for what is left there: if that is all of it, nothing is lost. Without the host, remove "
    "it from the job file: `dlctl start` goes on from the newest checkpoint. `dlctl stop --kill` "
    "ends what is left on hosts that can be reached again."
)
SECURITY = (
    "All connections are encrypted and authenticated with keys that are made for the run; they are "
    "handed out over ssh's standard input. Whoever does not hold one gets no connection. `dlctl "
    "keys rotate` gives new ones to all hosts while the run goes on; with a file of `dlctl keys "
    "reader` somebody on another machine can ask for its status, and nothing else. Your task "
    "runs with your rights on every host. SECURITY.md says what is defended and what is not."
)
EXAMPLE = """\
[servers]
count = 2
[workers]
count = 6

[[hosts]]                   # this machine, too
workers = 1

[[hosts]]
ssh = "gpu1"                # as in ~/.ssh/config
data = "10.0.0.11"          # its address in the fast network
batch_size = 64             # of each worker there, in place of that in [workers]

[[hosts]]
ssh = "ann@gpu2.example.org"
python = "/home/ann/venv/bin/python"
servers = 0"""


def hosts_page(version: str) -> str:
    page = Page("dlctl-hosts", 7, version)
    page.heading("NAME")
    page.paragraphs("dlctl-hosts - train on several machines")
    page.heading("DESCRIPTION")
    page.paragraphs(
        "One more section of the job file for each machine is all that it takes. dlctl reaches "
        "them over ssh, starts one agent on each, and the agents start servers and workers."
    )
    page.heading("FROM ONE MACHINE TO THREE")
    page.items(STEPS)
    for heading, text in (
        ("ADDRESSES AND PORTS", ADDRESSES),
        ("HOSTS THAT ARE AWAY", AWAY),
        ("SECURITY", SECURITY),
    ):
        page.heading(heading)
        page.paragraphs(text)
    page.heading("EXAMPLES")
    page.code(EXAMPLE)
    page.heading("SEE ALSO")
    page.paragraphs(
        "dlctl(1), dlctl-job(5), dlctl-slurm(7), dlctl-doctor(1), dlctl-plan(1), dlctl-start(1), "
        "dlctl-stop(1), ssh_config(5)"
    )
    return str(page)
