"""`dlctl-slurm(7)`: a run in a job of Slurm."""

from __future__ import annotations

from dlctl.cli.roff import Page

STEPS = [
    (
        "1. where to type",
        "On a machine of the cluster where `sbatch` works, such as a login node. The coordinator "
        "runs there as long as the run does: a place where processes that run for long are ended "
        "is no good one. Nothing is needed of Slurm but sbatch, squeue, scontrol, sinfo and "
        "scancel there, and srun and scontrol on the nodes; sacct is never asked.",
    ),
    (
        "2. what the nodes need",
        "The same dlctl and torch, at the same path as here, or at the `python` in [slurm]; and "
        "your data. The Python files beside the job file are sent. A directory that this machine "
        "and all nodes share: ~/.local/state/dlctl/slurm, or `dir` in [slurm]. The run directory "
        "itself may be on a disk of this machine alone; `run_dir` in [job] says where.",
    ),
    (
        "3. the section [slurm]",
        "`nodes` agents are started, one on each node; servers and workers are spread evenly over "
        "them. All other keys say what is asked of Slurm; see dlctl-job(5). [[hosts]] has no place "
        "beside it.",
    ),
    (
        "4. start",
        "`dlctl start job.toml` submits one job and waits until all are at work. In the queue, "
        'the progress and `dlctl status` say why: "job 17 is pending: Resources". `-d` returns '
        "at once. Then everything is as on one machine: `logs -f`, `set`, `scale`, `checkpoint`, "
        "`restart`, `stop`; `dlctl status` shows the node of every daemon.",
    ),
]
ENDS = [
    (
        "dlctl stop",
        "Saves, ends all daemons and the job, or takes it out of the queue. The job is COMPLETED "
        "for Slurm. `dlctl start` goes on from the checkpoint in a new job.",
    ),
    (
        "the time limit",
        "`notice_s` before it (Slurm may be up to a minute early) the run is saved and stopped; "
        "`dlctl start` goes on in a new job.",
    ),
    (
        "scancel, by anybody",
        "The run has failed, and its reason says so. What came after the last checkpoint is done "
        "again after `dlctl start`. Use `dlctl stop` instead.",
    ),
    (
        "preemption, scontrol requeue, a node that fails",
        "With `requeue = true` the run waits until Slurm has begun the job again, and goes on "
        "where it was if its servers come back to the nodes where their shards are. Otherwise it "
        "fails and says so, and `dlctl start` goes on from the newest checkpoint: save often, with "
        "every_s in [checkpoints]. After a requeue Slurm waits for about two minutes; `scontrol "
        "update jobid=17 StartTime=now` begins at once. If Slurm sends its signal before "
        "(PreemptParameters=send_user_signal), a checkpoint is saved.",
    ),
    (
        "a node that is lost while the job goes on",
        "It is waited for; after `host_s` in [timeouts] its workers are started on the other "
        "nodes. Without a shard the run fails, and `dlctl start` goes on from its checkpoint.",
    ),
]
FILES = (
    "In the shared directory every job has one of its own, of mode 0700: the script `job.sh`, what "
    "it has printed (`job.log`), and orders to the keepers on the nodes, which hold the keys of "
    "their agents (mode 0600, removed with the run). On the nodes, /tmp/dlctl-slurm-USERID, or "
    "`scratch` in [slurm]; nothing is left there when the job has ended."
)
ADDRESSES = (
    "The nodes connect to the coordinator at `address` in [network]; without it, at the address "
    "from which this machine reaches the first node that sinfo names. Servers listen at the "
    "address from which their node reaches the coordinator. See dlctl-hosts(7) for ports."
)
EXAMPLE = """\
[slurm]
nodes = 3
partition = "gpu"
time = "8h"
cpus_per_node = 8
gpus_per_node = 1
memory = "32G"
requeue = true
extra = ["--exclusive", "--mail-type=END"]

[checkpoints]
every_s = 300.0"""


def slurm_page(version: str) -> str:
    page = Page("dlctl-slurm", 7, version)
    page.heading("NAME")
    page.paragraphs("dlctl-slurm - train on the nodes of a Slurm cluster")
    page.heading("DESCRIPTION")
    page.paragraphs(
        "One section of the job file is all that it takes. dlctl submits one job with one agent "
        "on each node; the agents start servers and workers."
    )
    page.heading("A RUN IN SLURM")
    page.items(STEPS)
    page.heading("HOW IT ENDS")
    page.items(ENDS)
    page.heading("FILES")
    page.paragraphs(FILES)
    page.heading("ADDRESSES")
    page.paragraphs(ADDRESSES)
    page.heading("EXAMPLES")
    page.code(EXAMPLE)
    page.heading("SEE ALSO")
    page.paragraphs("dlctl-job(5), dlctl-hosts(7), dlctl-start(1), dlctl-stop(1), sbatch(1)")
    return str(page)
