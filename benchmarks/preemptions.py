"""Ten preemptions in one run, beside torchrun with `--requeue` and checkpoints: `make preemptions`.

    python -m benchmarks.preemptions [--times 10] [--out benchmarks/results/preemptions.json]

A real Slurm on four hosts that are network namespaces of this machine. Another user's job takes two
nodes, keeps them for a while and ends, ten times. Both sides train the digits on as many samples,
with the same batches of 16 per worker, the same pause in each, and evaluate the same held-out
scans. Slurm would let a requeued job wait for two minutes; both sides' jobs may start at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kit")]

from slurm.slurm_cluster import SlurmCluster, missing  # noqa: E402
from workplace import Workplace  # noqa: E402

from dlctl.ops import verify  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "preemptions.json"
NODES, TAKEN, BATCH_SIZE = 4, 2, 16
PAUSE_S = 0.2
"""In every batch: the cores of this machine are not what is compared."""
AWAY_S, BETWEEN_S = 6.0, 4.0
"""How long the other job keeps its nodes, and how long all train in between."""
SAMPLES = 60_000
EVERY_S = 4.5
"""Between two evaluations, about an epoch, and two checkpoints of torchrun's program."""
STOP_S = 5.0
"""Without a single step for so long, training has stopped."""
LONG_S, LOOK_S = 180.0, 0.1
REST_S = 1800.0
"""The most that a side may train after the last preemption."""
Json = dict[str, Any]

JOB = """[job]
name = "digits"
task = "task.py:task"
stop = {{ samples = {samples} }}

[algorithm]
name = "async-diloco"
local_steps = 4

[inner]
name = "sgd"
lr = 0.05

[optimizer]
name = "sgd"
lr = 0.5

[servers]
count = 2
durability = "disk"

[workers]
count = {workers}
min = 1
batch_size = {batch_size}
threads = 1

[evaluation]
every_epochs = 1

[checkpoints]
every_s = 30.0
"""
TASK = """
import threading
from train import Digits, functional


class Slow(Digits):
    def loss(self, model, batch):
        threading.Event().wait({pause_s})
        return super().loss(model, batch)

    def evaluate(self, model):
        guesses = model(self.test_images)
        loss = functional.cross_entropy(guesses, self.test_labels)
        return {{**super().evaluate(model), "loss": loss}}


task = Slow()
"""
DDP = '''
"""The digits with DistributedDataParallel: a checkpoint every few seconds, as PyTorch's tutorial on
torchrun has one every epoch."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from train import Digits

SAMPLES, PAUSE_S, EVERY_S, BATCH_SIZE, LR = {samples}, {pause_s}, {every_s}, {batch_size}, 0.1
here = Path(sys.argv[1])
state_file, record = here / "checkpoint.pt", here / "record.jsonl"
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
digits = Digits()
torch.manual_seed(0)
model = digits.model()
samples = 0
if state_file.exists():
    state = torch.load(state_file)
    model.load_state_dict(state["model"])
    samples = state["samples"]
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)


def say(kind, **more):
    if rank == 0:
        with record.open("a") as file:
            row = {{"at": time.time(), "kind": kind, "samples": samples, **more}}
            file.write(json.dumps(row) + "\\n")


def save():
    with torch.no_grad():
        guesses = model(digits.test_images)
        loss = functional.cross_entropy(guesses, digits.test_labels).item()
        accuracy = (guesses.argmax(1) == digits.test_labels).float().mean().item()
    say("evaluation", loss=loss, accuracy=accuracy)
    if rank == 0:
        new = state_file.with_suffix(".new")
        torch.save({{"model": model.state_dict(), "samples": samples}}, new)
        new.rename(state_file)


say("begin")
saved_at = time.monotonic()
images, labels = digits.train_images, digits.train_labels
while samples < SAMPLES:
    epoch, place = divmod(samples, len(images))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    mine = order[place + rank * BATCH_SIZE :][:BATCH_SIZE]
    mine = mine if len(mine) == BATCH_SIZE else order[:BATCH_SIZE]
    time.sleep(PAUSE_S)
    optimizer.zero_grad()
    functional.cross_entropy(replica(images[mine]), labels[mine]).backward()
    optimizer.step()
    samples += BATCH_SIZE * ranks
    say("step")
    due = torch.tensor(float(time.monotonic() - saved_at > EVERY_S))
    dist.broadcast(due, 0)
    if due:
        save()
        saved_at = time.monotonic()
save()
say("end")
dist.destroy_process_group()
'''
TORCHRUN = """#!/bin/bash
#SBATCH --nodes={nodes} --exclusive --chdir={here} --output={here}/log --open-mode=append --requeue
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
srun --ntasks-per-node=1 bash -c '{python} -m torch.distributed.run --nnodes={nodes} \
    --node-rank=$SLURM_NODEID --nproc-per-node=1 --master-addr={address} --master-port=29511 \
    ddp.py {here}'
"""
HOG = """#!/bin/bash
#SBATCH --nodes={nodes} --exclusive --chdir=/ --output=/dev/null --partition=urgent
sleep 600
"""


@dataclass
class Side:
    """What one side has done."""

    name: str
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the first step -> samples."""
    losses: list[tuple[float, int, float, float]] = field(default_factory=list)
    """Seconds, samples, loss and accuracy on held-out scans."""
    taken: list[tuple[float, float]] = field(default_factory=list)
    """From when to when nodes were taken, in seconds since 1970."""
    again: int = 0
    """Samples trained again."""
    lost: int = 0
    """Acknowledged pushes that are in no shard."""
    twice: int = 0
    """Pushes that were applied twice."""
    acknowledged: int = 0

    def stops(self) -> tuple[int, float]:
        """How often there was no step for STOP_S, and the longest time without one, in seconds."""
        times = [at for at, _ in self.steps]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return sum(gap > STOP_S for gap in gaps), max(gaps)

    def to_json(self) -> Json:
        stops, longest_s = self.stops()
        return {
            "name": self.name, "stops": stops, "longest_s": round(longest_s, 2),
            "seconds": round(self.steps[-1][0] - self.steps[0][0], 1),
            "samples": self.steps[-1][1], "again": self.again, "lost": self.lost,
            "twice": self.twice, "acknowledged": self.acknowledged,
            "loss": round(self.losses[-1][2], 4), "accuracy": round(self.losses[-1][3], 4),
            "losses": [[round(at, 1), n, round(loss, 4)] for at, n, loss, _ in self.losses],
            "progress": [[round(at, 1), n] for at, n in self.steps[:: len(self.steps) // 400 + 1]],
            "taken": [[round(a, 1), round(b, 1)] for a, b in self.taken],
        }  # fmt: skip


def until(what: str, holds: Callable[[], Any], most_s: float = LONG_S) -> None:
    deadline = time.monotonic() + most_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        threading.Event().wait(LOOK_S)


def preempt(
    slurm: SlurmCluster,
    side: Side,
    times: int,
    trains: Callable[[], bool],
    over: Callable[[], bool],
) -> None:
    """Take nodes and give them back; `trains`: on all nodes."""
    script = slurm.directory / "hog.sh"
    script.write_text(HOG.format(nodes=TAKEN))
    for number in range(times):
        until("all train", lambda: trains() or over())
        threading.Event().wait(BETWEEN_S)
        if over():
            raise RuntimeError(f"over after {number} preemptions: raise SAMPLES")
        side.taken.append(_take(slurm, script))
        for job in slurm.jobs():
            slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        print(f"{side.name}: preemption {number + 1}", flush=True)


def _take(slurm: SlurmCluster, script: Path) -> tuple[float, float]:
    """Another user's job has nodes for a while; from when to when."""
    hog = slurm.run("sbatch", "--parsable", str(script)).stdout.strip()
    until("nodes are taken", lambda: slurm.facts(hog).get("JobState") == "RUNNING")
    began = time.time()
    threading.Event().wait(AWAY_S)
    slurm.run("scancel", hog)
    ended = time.time()
    until("they are free", lambda: hog not in slurm.jobs())
    return began, ended


def with_dlctl(slurm: SlurmCluster, times: int) -> Side:
    side, place = Side("dlctl"), Workplace(slurm.cluster.enter, slurm.cluster.env)
    try:
        digits = ROOT / "examples" / "digits"
        shutil.copy(digits / "digits.npz", slurm.directory)
        shared = f'Path("{slurm.directory}")'  # Nodes get the Python files only.
        text = (digits / "train.py").read_text().replace("Path(__file__).parent", shared)
        (place.path / "train.py").write_text(text)
        (place.path / "task.py").write_text(TASK.format(pause_s=PAUSE_S))
        job = JOB.format(samples=SAMPLES, workers=NODES, batch_size=BATCH_SIZE) + slurm.section(
            NODES, jobs='"each"', requeue="true", cpus_per_node="4"
        )
        (place.path / "job.toml").write_text(job)
        place.start("--timeout", "120s")
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(place, side, ended))
        watch.start()

        def trains() -> bool:
            rows = place.run().get("daemons", [])
            return (
                sum(r["name"].startswith("worker") and r["state"] == "running" for r in rows)
                == NODES
            )

        def over() -> bool:
            return place.run().get("state") in ("finished", "failed", "stopped")

        try:
            preempt(slurm, side, times, trains, over)
            until("it is over", over, REST_S)
        finally:
            ended.set()
            watch.join()
        _verify(place, side)
    finally:
        place.dlctl("stop", "--kill")
        place.close()
    return side


def _watch(place: Workplace, side: Side, ended: threading.Event) -> None:
    """Note the progress of the run, several times a second."""
    evaluated = -1
    while not ended.wait(LOOK_S):
        run, now = place.run(), time.time()
        samples = run.get("samples") or 0
        if samples and (not side.steps or samples > side.steps[-1][1]):
            side.steps.append((now, samples))
        step, row = run.get("evaluation_step"), run.get("evaluation")
        if row and step != evaluated:
            evaluated = step
            side.losses.append((now, samples, row["loss"], row["accuracy"]))


def _verify(place: Workplace, side: Side) -> None:
    run = place.run()
    assert run["state"] == "finished", run
    said = json.loads(place.dlctl("verify", "--json").out)
    side.lost, side.acknowledged = said["lost"] + said["unchecked"], said["acknowledged"]
    newest = max(place.directory.glob("ckpt/*/manifest.json"))
    for shard in json.loads(newest.read_text())["shards"]:
        state = shard["state"]
        side.twice += state["version"] - sum(verify.table_of(state["deliveries"]).values())
    row = run["evaluation"]
    side.losses.append((time.time(), run["samples"], row["loss"], row["accuracy"]))


def with_torchrun(slurm: SlurmCluster, times: int) -> Side:
    side, here = Side("torchrun --requeue"), slurm.directory / "ddp"
    here.mkdir()
    for name in ("train.py", "digits.npz"):
        shutil.copy(ROOT / "examples" / "digits" / name, here)
    values = {"samples": SAMPLES, "pause_s": PAUSE_S, "every_s": EVERY_S, "batch_size": BATCH_SIZE}
    (here / "ddp.py").write_text(DDP.format(**values))
    script = here / "job.sh"
    address = slurm.cluster.address("h1")
    script.write_text(
        TORCHRUN.format(nodes=NODES, here=here, python=sys.executable, address=address)
    )
    job = slurm.run("sbatch", "--parsable", str(script)).stdout.strip()
    record = here / "record.jsonl"

    def rows() -> list[Json]:
        found = []
        if record.exists():
            for line in record.read_text().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def trains() -> bool:
        newest = rows()[-1:]
        is_new = not side.taken or (newest and newest[0]["at"] > side.taken[-1][1])
        return bool(newest and is_new and newest[0]["kind"] == "step")

    def over() -> bool:
        return rows()[-1:] != [] and rows()[-1]["kind"] == "end"

    try:
        preempt(slurm, side, times, trains, over)
        until("it is over", over, REST_S)
    except BaseException:
        print((here / "log").read_text()[-4000:] if (here / "log").exists() else "no log")
        raise
    finally:
        slurm.run("scancel", job)
    reached = 0
    for row in rows():
        if row["kind"] == "step":
            side.again += BATCH_SIZE * NODES if row["samples"] <= reached else 0
            reached = max(reached, row["samples"])
            side.steps.append((row["at"], row["samples"]))
        elif row["kind"] == "evaluation":
            side.losses.append((row["at"], row["samples"], row["loss"], row["accuracy"]))
    return side


def relative(side: Side) -> Side:
    """With times since its first step."""
    zero = side.steps[0][0]
    side.steps = [(at - zero, n) for at, n in side.steps]
    side.losses = [(at - zero, *rest) for at, *rest in side.losses]  # type: ignore[misc]
    side.taken = [(a - zero, b - zero) for a, b in side.taken]
    return side


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", choices=["dlctl", "torchrun"])
    options = parser.parse_args()
    if why := missing():
        print(f"no Slurm: {why}", file=sys.stderr)
        return 1
    sides = {"dlctl": with_dlctl, "torchrun": with_torchrun}
    records = []
    for name, train in sides.items():
        if options.only in (None, name):
            with SlurmCluster(NODES) as slurm:
                row = relative(train(slurm, options.times)).to_json()
            records.append(row)
            shown = {k: v for k, v in row.items() if not isinstance(v, list)}
            print(*(f"{key} {value}" for key, value in shown.items()), sep=", ", flush=True)
    if options.only is None:
        content = {"times": options.times, "nodes": NODES, "taken": TAKEN, "sides": records}
        options.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    return 0 if all(not row["lost"] and not row["twice"] for row in records) else 1


if __name__ == "__main__":
    sys.exit(main())
