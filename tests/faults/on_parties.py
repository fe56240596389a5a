"""Split learning between parties whose processes die: each batch is in each part once."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dlctl.runs import acks, checkpoints, lineage
from dlctl.runs.acks import AckRecord

from . import ledger
from .job import POLL_S, Broken, Job, Options, pause
from .on_workers import replaced, seen_exit
from .rows import Incident, Trial, row

BATCH, PAUSE_S = 8, 0.004
CLIENTS, HEAD = 2, "worker-2"
SHARDS = 2
"""The clients' part and the head's."""
VICTIMS = ("worker-0", HEAD, "coordinator", "worker-1", HEAD, "server-0", "server-1")
BACK_S = 30.0
LINE = struct.Struct(f"<{3 + BATCH}Q")
"""What `parties_task.py` writes: slot, incarnation, pid, and the samples of a batch."""

JOB = """
[job]
name = "parties"
stop = {{ steps = 1000000000 }}
run_dir = "runs"

[algorithm]
name = "split"

[optimizer]
name = "sgd"
lr = 1.0

[servers]
durability = "{durability}"

[workers]
batch_size = {batch}
threads = 1
device = "cpu"
restarts_max = 10000

[data]
portion_batches = {portion_batches}

[checkpoints]
every_s = 0.0
keep = 2

[evaluation]
every_epochs = 0.0

[network]
transport = "{transport}"

[timeouts]
silent_s = {silent_s}

[[parties]]
name = "clinic"
role = "client"
task = "clinic/parties_task.py:task"
host = "local"
workers = {clients}

[[parties]]
name = "lab"
role = "head"
task = "lab/parties_task.py:task"
host = "local"
"""


class PartiesJob(Job):
    """Two clients in turn, and a head."""

    def _write_files(self) -> None:
        super()._write_files()
        o = self.options
        for party in ("clinic", "lab"):
            (self.path / party).mkdir()
            shutil.copy(Path(__file__).with_name("parties_task.py"), self.path / party)
        text = JOB.format(
            durability=o.durability, batch=BATCH, portion_batches=o.portion_batches,
            transport=o.transport, silent_s=o.silent_s, clients=CLIENTS,
        )  # fmt: skip
        (self.path / "job.toml").write_text(text)
        self.env |= {"LEDGER_BATCH": str(BATCH), "LEDGER_PAUSE_S": str(PAUSE_S)}

    def until_all_step(self, timeout_s: float = 60.0) -> None:
        before = self.watch.now()
        self.until(
            "both parts are trained and nobody is in trouble",
            lambda: (
                all(self.watch.shard_grown(shard, before) for shard in range(SHARDS))
                and self.run()["state"] == "running"
            ),
            timeout_s,
        )

    def is_full(self) -> bool:
        """Whether the epoch is nearly over: in the next one each sample would come again."""
        batches = self.blocks_path.stat().st_size // LINE.size / 2
        return batches * BATCH > 0.7 * self.options.cells

    def judge(self) -> ledger.Verdict:
        weights = np.zeros(SHARDS * self.options.cells, np.float32)
        good = lineage.newest_good(self.directory)
        if good is not None:
            directory, manifest = good
            weights = checkpoints.read_slice(directory, manifest, "w", 0, manifest["size"])
        return judge(weights, self.blocks_path.read_bytes(), acks.read_all(self.directory))


class DrainedJob(PartiesJob):
    """Its head is killed as soon as the run drains: the next one answers what is under way."""

    def finish(self) -> ledger.Verdict:
        self.watch.end()
        before = self.incarnations()[HEAD]
        killer = threading.Thread(target=self._kill_the_head, args=(self.pid(HEAD),))
        killer.start()
        ended = self.dlctl("stop", "--grace", "30s")
        killer.join()
        late = [event["text"] for event in self.events() if event["kind"] == "late"]
        if ended.code or late:
            raise Broken(f"dlctl stop: exit {ended.code}: {' '.join(late)} {ended.err[-600:]}")
        if self.incarnations()[HEAD] == before:
            raise Broken("the head was not replaced: it had drained before it was killed")
        return self.judge()

    def _kill_the_head(self, pid: int) -> None:
        until = time.monotonic() + BACK_S
        while self.run()["state"] != "stopping" and time.monotonic() < until:
            pause(POLL_S)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def judge(weights: Any, lines: bytes, records: Iterable[AckRecord]) -> ledger.Verdict:
    """`weights`: float32[2 * samples], the clients' part and the head's. Raises AssertionError for
    acknowledged pushes of batches that nobody has computed.
    """
    counts = weights.reshape(SHARDS, -1)
    computed: defaultdict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
    whole_lines = lines[: len(lines) // LINE.size * LINE.size]
    for slot, incarnation, _, *rows in LINE.iter_unpack(whole_lines):
        computed[slot, incarnation].append(tuple(rows))
    acknowledged = lost = 0
    for record in records:
        mine = computed[record.slot, record.incarnation]
        for shard, count in enumerate(record.counts):
            assert count <= len(mine), f"{record} was told of more pushes than it made gradients"
            acknowledged += count
            lost += sum(bool((counts[shard][list(rows)] == 0).any()) for rows in mine[:count])
    given = np.zeros(counts.shape[1], bool)
    given[[row for batches in computed.values() for rows in batches for row in rows]] = True
    whole = np.isfinite(counts) & (counts == np.round(counts)) & (counts >= 0)
    return ledger.Verdict(
        acknowledged=acknowledged,
        lost=lost,
        twice=int((counts[whole] > 1).sum()),
        applied=int((counts[0] > 0).sum()) // BATCH,
        strange=int((~whole).sum()) + int((counts[:, ~given] != 0).sum()),
    )


@row(
    "party-kill",
    "a client, the head, a server or the coordinator: lost 0, twice 0 in both parts; both "
    "train again; nobody else is replaced",
)
def party_kill(trial: Trial) -> None:
    trial.run(kill_in_turn, per_job=len(VICTIMS), job_type=PartiesJob)


def kill_in_turn(trial: Trial, job: Job) -> Incident:
    victim = VICTIMS[len(trial.result.incidents) % len(VICTIMS)]
    before, pid, last = job.incarnations(), job.pid(victim), job.last_event()
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    if victim == "coordinator":
        detected = job.until(
            "there is a new coordinator", lambda: job.run()["pid"] not in (pid, None)
        )
    else:
        detected = job.until(f"{victim}'s end is known", lambda: seen_exit(job, victim, last))
    job.until(f"{victim} is back", lambda: job.incarnations()[victim] > before[victim], BACK_S)
    counts = job.watch.now()
    resumed = job.until(
        "both parts are trained again",
        lambda: all(job.watch.shard_grown(shard, counts) for shard in range(SHARDS)),
        BACK_S,
    )
    return Incident(
        detect_s=detected - began,
        resume_s=resumed - began,
        false_failovers=replaced(job, before, victim),
    )


@row(
    "party-kill-drain",
    "the head is killed while a stop drains: another one answers, no worker is given up; lost 0, "
    "twice 0",
    times=5,
)
def party_kill_drain(trial: Trial) -> None:
    options = Options(portion_batches=64)  # What clients compute until they have drained.
    trial.run(lambda trial, job: Incident(), options, per_job=1, job_type=DrainedJob)
