"""Bits that flip, and files that are cut, where a run keeps what it must find again.

Each trial damages a copy at one random place, asks what would be used, and compares that with the
truth, bit by bit. Damage is undetected if anything else would have been used.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from dlctl.errors import DlctlError
from dlctl.job.config import Servers
from dlctl.runs import kept_shards, lineage

from . import kept
from .job import SERVERS, Broken, Job, Options, pause
from .on_disk import good, save
from .rows import Incident, Trial, row

SMALL = Options(cells=1 << 12, push="2MB/s")
"""Small files, so that each of their parts is hit often."""
ENDS_S = 10.0
SHOWN = 5
"""Cases of undetected damage that are told one by one."""
Damage = Callable[[random.Random, bytearray], None]


def flip(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def wipe(rng: random.Random, data: bytearray) -> None:
    """A sector of zeros, as disks give it for what they have lost."""
    at = rng.randrange(len(data))
    end = min(at + 512, len(data))
    data[at:end] = bytes(end - at)


DAMAGES: list[Damage] = [flip, flip, flip, cut, wipe]
"""Bits flip more often than files are cut."""


def damaged(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """(what was done, the bytes), different from what they were."""
    while True:
        damage, changed = rng.choice(DAMAGES), bytearray(data)
        damage(rng, changed)
        if changed != data:
            return damage.__name__, bytes(changed)


def tell(trial: Trial, undetected: list[str]) -> None:
    result = trial.result
    if undetected:
        result.problems.append(f"damage was not detected {len(undetected)} times")
        result.problems += undetected[:SHOWN]
    print(f"\r  {result.name} {len(result.incidents)} ", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- checkpoints


@row("checkpoint-damage", "all detected before use, the previous one is used", times=1000)
def checkpoint_damage(trial: Trial) -> None:
    """At last the run is started again from what is damaged."""
    job = Job(SMALL)
    try:
        job.start()
        job.until_all_step()
        save(job)
        before = good(job)
        job.until_all_step()
        trial.judge(job)
        newest = good(job)
        assert before is not None
        assert newest not in (before, None)
        _damage_checkpoint(trial, job, newest, before)
        _start_from_damaged(trial, job, newest, before)
    except Broken as broken:
        trial.result.problems.append(str(broken))
        trial.result.notes.append(job.story())
    finally:
        job.close()


def _damage_checkpoint(trial: Trial, job: Job, newest: Path, before: Path) -> None:
    files = {path: path.read_bytes() for path in sorted(newest.iterdir())}
    undetected = []
    for _ in range(trial.times):
        path = trial.rng.choice(sorted(files))
        what, changed = damaged(trial.rng, files[path])
        path.write_bytes(changed)
        reasons: list[str] = []
        found = lineage.newest_good(job.directory, reasons.append)
        path.write_bytes(files[path])
        trial.result.incidents.append(Incident())
        if found is None or found[0] != before or not reasons:
            undetected.append(f"{what} in {path.name} at byte {_where(files[path], changed)}")
    tell(trial, undetected)
    if good(job) != newest:
        trial.result.problems.append("the checkpoint is not good any more without damage")


def _where(data: bytes, changed: bytes) -> int:
    pairs = zip(data, changed, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(changed))


def _start_from_damaged(trial: Trial, job: Job, newest: Path, before: Path) -> None:
    """With no other state left, and the newest checkpoint damaged, a run goes on from the one
    before it, and says so."""
    for path in kept_shards.places(job.directory, Servers()):
        shutil.rmtree(path, ignore_errors=True)
    shard = newest / "shard-1.safetensors"
    shard.write_bytes(damaged(trial.rng, shard.read_bytes())[1])
    ended = job.dlctl("start", "job.toml")
    if ended.code != 0:
        raise Broken(f"dlctl start: exit {ended.code}: {ended.err[-400:]}")
    if job.run()["resume"] != str(before):
        trial.result.problems.append(f"it went on from {job.run()['resume']}, not from {before}")
    if str(shard) not in ended.err:
        trial.result.problems.append("dlctl start does not name the damaged file")
    job.until("it trains", lambda: job.run()["state"] == "running", 60.0)


# ---------------------------------------------------------------- states of servers


@row("state-damage", "in a state that was closed in order all damage is detected", times=1000)
def state_damage(trial: Trial) -> None:
    job = Job(SMALL)
    try:
        job.start()
        job.until_all_step()
        _end_servers_in_order(job)
        found = kept.files(job)
        trial.count(kept.judge(job, found))
        _damage_states(trial, job, found)
    except (Broken, DlctlError) as broken:
        trial.result.problems.append(str(broken))
    finally:
        job.close()


def _end_servers_in_order(job: Job) -> None:
    """When everybody else is gone, SIGTERM makes a server close its state and end."""
    servers = [psutil.Process(job.pid(f"server-{shard}")) for shard in range(SERVERS)]
    others = [p for p in job.processes() if p.pid not in {server.pid for server in servers}]
    for process in others:
        process.kill()
    psutil.wait_procs(others, timeout=ENDS_S)
    for process in servers:
        if process.is_running():
            process.terminate()
    _, left = psutil.wait_procs(servers, timeout=ENDS_S)
    if left:
        raise Broken("a server does not end")


def _damage_states(trial: Trial, job: Job, files: dict[int, bytes]) -> None:
    truth = {shard: kept.parameters(job, shard, data) for shard, data in files.items()}
    undetected = []
    for _ in range(trial.times):
        shard = trial.rng.randrange(SERVERS)
        what, changed = damaged(trial.rng, files[shard])
        trial.result.incidents.append(Incident())
        try:
            w = kept.parameters(job, shard, changed)
        except DlctlError:
            continue
        if not np.array_equal(w, truth[shard]):
            undetected.append(f"{what} of shard {shard} at byte {_where(files[shard], changed)}")
    tell(trial, undetected)


@row("all-kill-states", "kill -9 of everything: lost 0, twice 0 in the states left behind")
def all_kill_states(trial: Trial) -> None:
    """Before anybody has recovered anything. One job for each fault."""
    while len(trial.result.incidents) < trial.times:
        job = Job(Options(cells=1 << 15))
        trial.result.jobs += 1
        try:
            job.start()
            job.until_all_step()
            pause(trial.rng.uniform(0.0, 1.0))
            victims = job.processes()
            trial.rng.shuffle(victims)
            for process in victims:
                process.kill()
            psutil.wait_procs(victims, timeout=ENDS_S)
            trial.count(kept.judge(job, kept.files(job)))
            trial.add(Incident())
        except (Broken, DlctlError) as broken:
            trial.result.problems.append(str(broken))
            return
        finally:
            job.close()
