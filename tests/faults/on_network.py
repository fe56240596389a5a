"""The network between daemons: reset, cut, one-way, lossy.

The whole job runs on TCP in a network namespace of its own, in which everything goes over its
loopback interface; packets are dropped there by nftables rules. Nothing outside is touched, and the
namespace ends with the last process in it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .job import SERVERS, WORKERS, Job, Options, pause
from .on_workers import replaced
from .rows import Incident, Trial, root, row, tool

PORT = 7000
COORDINATOR, SERVER_PORTS = PORT, [PORT + 1 + index for index in range(SERVERS)]
PORTS = [COORDINATOR, *SERVER_PORTS]
HEAL_S_MAX = 10.0
LOSS_S, LOSS_SILENT_S = 8.0, 6.0
"""Packets are lost for longer than somebody may be silent, or nobody could be taken for dead. What
TCP sends again five times in vain is sent once more after 6.2 s."""
RESETS_MAX = 4
LONG_S = 120.0
NEEDS = (root, tool("nft"), tool("ip"), tool("unshare"), tool("nsenter"))
TABLE = "add table inet dl\nadd chain inet dl in { type filter hook input priority 0 ; }\n"
Cut = list[str]
"""nftables rules, without their place."""


class Namespace:
    """A network of its own, with a loopback interface that loses what it is told to."""

    def __init__(self) -> None:
        script = "ip link set lo up && echo up && exec cat"
        # It holds the namespace until its input is closed, also by the end of this process.
        self._holder = subprocess.Popen(
            ["unshare", "-n", "--", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"
        self.enter = ("nsenter", "-t", str(self._holder.pid), "-n", "--")
        self._nft(TABLE)

    def _nft(self, script: str) -> None:
        subprocess.run([*self.enter, "nft", "-f", "-"], input=script, text=True, check=True)

    def cut(self, rules: Cut) -> None:
        """Have these rules, and no others."""
        added = [f"add rule inet dl in {rule}" for rule in rules]
        self._nft("\n".join(["flush chain inet dl in", *added, ""]))

    def kill_sockets(self, port: int) -> None:
        """End the connections that were accepted at a port; what their ends say is dropped."""
        found = ["state", "established", f"sport = :{port}"]
        subprocess.run([*self.enter, "ss", "-K", *found], capture_output=True, check=True)

    def close(self) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


@contextmanager
def networked() -> Iterator[tuple[Namespace, Options]]:
    """A namespace, and the options of jobs in it: silent for 15 s is dead, as by default."""
    namespace = Namespace()
    try:
        yield (
            namespace,
            Options(transport="tcp", port=PORT, silent_s=15.0, enter=namespace.enter),
        )
    finally:
        namespace.close()


Disturb = Callable[[Namespace, Trial], None]


def on_network(trial: Trial, disturb: Disturb, **changes: Any) -> None:
    """Disturb the network, end that, and watch it heal; as often as the trial asks for.

    changes: of the job's options.
    """
    with networked() as (namespace, options):
        options = replace(options, **changes)
        trial.run(lambda trial, job: heal_after(namespace, trial, job, disturb), options)


def heal_after(namespace: Namespace, trial: Trial, job: Job, disturb: Disturb) -> Incident:
    before, last = job.incarnations(), job.last_event()
    began = time.monotonic()
    try:
        disturb(namespace, trial)
    finally:
        namespace.cut([])
    healed, counts, wall = time.monotonic(), job.watch.now(), time.time()
    resumed = job.until(
        "all workers push to all shards again, and every daemon is heard",
        lambda: (
            all(job.watch.grown(slot, counts) > 0 for slot in range(WORKERS))
            and all((d["updated_at"] or 0.0) > wall for d in job.daemons().values())
        ),
        60.0,
    )
    incident = Incident(resume_s=resumed - healed, false_failovers=replaced(job, before))
    incident.others_gap_s = job.watch.longest_gap_s(range(WORKERS), began, resumed)
    assert incident.resume_s is not None
    incident.require(incident.resume_s <= HEAL_S_MAX, f"healed after {incident.resume_s:.1f} s")
    deaths = [e["text"] for e in job.events(last) if e["kind"] in ("exit", "silent", "lost")]
    incident.require(not deaths, f"somebody was taken for dead: {deaths[:2]}")
    return incident


def both_ways(port: int) -> Cut:
    return [f"tcp dport {port} drop", f"tcp sport {port} drop"]


def reset(namespace: Namespace, trial: Trial) -> None:
    """Also again while what was lost with the last connection is still on its way."""
    port = trial.rng.choice(PORTS)
    for _ in range(trial.rng.randint(1, RESETS_MAX)):
        namespace.cut([f"tcp dport {port} reject with tcp reset"])
        pause(trial.rng.uniform(0.02, 0.5))
        namespace.cut([])
        pause(trial.rng.uniform(0.0, 0.3))


@row("net-reset", "connections are reset: lost 0, twice 0, no false death, heals", needs=NEEDS)
def net_reset(trial: Trial) -> None:
    on_network(trial, reset)


@row("net-reset-large", "the same with messages that travel in segments", needs=NEEDS)
def net_reset_large(trial: Trial) -> None:
    on_network(trial, reset, cells=1 << 21, work=0, push="off")


@row("net-half-open", "one end is gone and the other does not know it: the same", needs=NEEDS)
def net_half_open(trial: Trial) -> None:
    def half_open(namespace: Namespace, trial: Trial) -> None:
        port = trial.rng.choice(PORTS)
        namespace.cut(both_ways(port))
        namespace.kill_sockets(port)
        pause(trial.rng.uniform(0.05, 1.0))

    on_network(trial, half_open)


def lossy(percent: int) -> Disturb:
    def lose(namespace: Namespace, trial: Trial) -> None:
        namespace.cut([f"meta l4proto tcp numgen random mod 100 < {percent} drop"])
        pause(LOSS_S)

    return lose


@row("net-loss-2", "2 % of all packets are lost: lost 0, twice 0, no false death", needs=NEEDS)
def net_loss_2(trial: Trial) -> None:
    on_network(trial, lossy(2), silent_s=LOSS_SILENT_S)


@row("net-loss-10", "10 % of all packets are lost: the same", needs=NEEDS)
def net_loss_10(trial: Trial) -> None:
    on_network(trial, lossy(10), silent_s=LOSS_SILENT_S)


@row("net-one-way", "one direction is cut for some seconds: the same", needs=NEEDS)
def net_one_way(trial: Trial) -> None:
    def cut(namespace: Namespace, trial: Trial) -> None:
        port, direction = trial.rng.choice(PORTS), trial.rng.choice(["sport", "dport"])
        namespace.cut([f"tcp {direction} {port} drop"])
        pause(trial.rng.uniform(1.0, 6.0))

    on_network(trial, cut)


@row("net-partition", "a daemon is cut off for some seconds: the same", needs=NEEDS)
def net_partition(trial: Trial) -> None:
    def cut(namespace: Namespace, trial: Trial) -> None:
        namespace.cut(both_ways(trial.rng.choice(PORTS)))
        pause(trial.rng.uniform(1.0, 6.0))

    on_network(trial, cut)


@row("net-partition-120s-servers", "all servers are cut off for 120 s: the same", 1, NEEDS)
def net_partition_servers(trial: Trial) -> None:
    def cut(namespace: Namespace, trial: Trial) -> None:
        namespace.cut([rule for port in SERVER_PORTS for rule in both_ways(port)])
        pause(LONG_S)

    on_network(trial, cut)


@row("net-partition-120s-coordinator", "the coordinator is cut off for 120 s: the same", 1, NEEDS)
def net_partition_coordinator(trial: Trial) -> None:
    def cut(namespace: Namespace, trial: Trial) -> None:
        namespace.cut(both_ways(COORDINATOR))
        pause(LONG_S)

    on_network(trial, cut)
