"""GPT-2 of 124 million parameters, made from its sizes: two workers with DiLoCo and with Downpour.

Memory is the peak of each process over a whole run, as in **cut_memory**: proportional set size
without mapped files, less that of the same run with a tiny model, in copies of the model (498 MB).
A worker's is given without the activations: those are what plain torch needs beyond its four copies
(parameters, gradients, two moments of AdamW). The tasks note when each step begins. An exchange is
by how much the interval with a push and a fetch is longer than the others; beside it, two
connections echo as many bytes over TCP at once. A step is compared with one of two processes of
plain torch, side by side.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.cut_memory import own_bytes
from benchmarks.echo import echo, read_exactly
from benchmarks.figures import Figure, ratio
from benchmarks.sandbox import Dlctl, sandbox
from dlctl.runs import database, paths

CHAPTER = "large"
EXAMPLE = Path(__file__).parents[1] / "examples" / "chargpt"
WORKERS, LOCAL_STEPS, STEPS, WARM_UP = 2, 3, 15, 3
"""Steps of each worker; those before the timing."""
SERVER_COPIES, WORKER_COPIES, EXCHANGE_ASKED, PLAN_ASKED = 5.0, 5.2, 1.3, 0.1
COPIES_OF_PLAIN = 4
POLL_S = 0.02


class Size(NamedTuple):
    """Of a GPT."""

    vocabulary: int
    context: int
    width: int
    heads: int
    layers: int

    @property
    def model_bytes(self) -> int:
        width = self.width
        block = 12 * width * width + 13 * width
        return 4 * ((self.vocabulary + self.context + 2) * width + self.layers * block)


TINY, GPT2 = Size(96, 64, 16, 2, 2), Size(50_257, 1024, 768, 12, 12)
TASK = f'''"""The GPT of the example in another size, on random tokens; notes its steps."""
import os
import sys
import time

sys.path.insert(0, {str(EXAMPLE)!r})
import task as example
import torch
from torch.utils.data import TensorDataset

vocabulary, example.CONTEXT, example.WIDTH, example.HEADS, example.LAYERS = {{size}}
example.CHARACTERS = range(vocabulary)
TOKENS = min(64, example.CONTEXT)


class Large:
    times = []

    def model(self):
        return example.Gpt()

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(vocabulary, (256, TOKENS + 1), generator=generator))

    def loss(self, model, batch):
        self.times.append(time.time())
        name = os.environ.get("DLCTL_NAME", str(os.getpid()))
        with open(f"{{{{__file__}}}}.{{{{name}}}}.times", "w") as file:
            print(*self.times, file=file)
        return example.loss_of(model, *batch)


task = Large()
'''
PLAIN = """import sys

import torch
import train
from torch.utils.data import DataLoader

torch.set_num_threads(1)
model = train.task.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step, batch in zip(range(int(sys.argv[1])), DataLoader(train.task.dataset(), shuffle=True)):
    optimizer.zero_grad()
    loss = train.task.loss(model, batch)
    loss.backward()
    optimizer.step()
"""
METHODS = {
    "diloco": f'name = "diloco"\nlocal_steps = {LOCAL_STEPS}',
    "downpour": 'name = "downpour"',
}
JOB = """[job]
name = "bench"
task = "train.py:task"
stop = {{ steps = {steps} }}
[algorithm]
{method}
[inner]
name = "adamw"
lr = 1e-4
[servers]
count = 1
[network]
transport = "tcp"
encryption = "none"
[workers]
count = {workers}
batch_size = 1
threads = 1
device = "cpu"
[checkpoints]
every_s = 0
[evaluation]
every_epochs = 0
"""


class Run(NamedTuple):
    peaks: dict[str, int]
    """Name of the daemon -> bytes."""
    intervals_s: list[list[float]]
    """Of each worker: from the begin of a step to that of the next one."""


def measure(*, quick: bool) -> list[Figure]:
    """quick: the tiny model instead of the large one."""
    size = TINY if quick else GPT2
    plain = [_plain(each) for each in (TINY, size)]
    step_s = median(interval for one in plain[1].intervals_s for interval in one[WARM_UP:])
    activations = (
        min(plain[1].peaks.values()) - min(plain[0].peaks.values())
    ) - COPIES_OF_PLAIN * size.model_bytes
    raw_s = _raw_exchange_s(size.model_bytes)
    figures = []
    for method in METHODS:
        small, large = _run(method, TINY), _run(method, size)
        own = {name: large.peaks[name] - small.peaks[name] for name in large.peaks}
        figures += _memory(method, own, activations, size)
        figures += _times(method, large, step_s, raw_s)
    return figures


def _memory(method: str, own: dict[str, int], activations: int, size: Size) -> list[Figure]:
    of_workers = [taken for name, taken in own.items() if name.startswith("worker")]
    rest = f"without {activations / 1e6:.0f} MB of activations"
    found = [
        ("server", own["server-0"], SERVER_COPIES, ""),
        ("a worker", max(of_workers) - activations, WORKER_COPIES, rest),
    ]
    return [
        Figure(CHAPTER, f"{method}: peak of {what}, in models", "", (taken / size.model_bytes,),
               asked=asked, detail=f"{taken / 1e6:.0f} MB {more}".strip())
        for what, taken, asked, more in found
    ]  # fmt: skip


def _times(method: str, run: Run, plain_s: float, raw_s: float) -> list[Figure]:
    """DiLoCo computes LOCAL_STEPS steps and waits for an exchange; Downpour exchanges beside every
    step, so its steps have all of it in them.
    """
    intervals = [one[WARM_UP:] for one in run.intervals_s]
    if method == "downpour":
        step_s = median(each for one in intervals for each in one)
        return [
            ratio(CHAPTER, f"{method}: a step with its exchange / plain torch", [step_s], [plain_s])
        ]
    # The interval behind the last step of a round has the exchange in it.
    at = [(n + WARM_UP + 1) % LOCAL_STEPS == 0 for n in range(max(map(len, intervals)))]
    without = [s for one in intervals for s, has in zip(one, at, strict=False) if not has]
    having = [s for one in intervals for s, has in zip(one, at, strict=False) if has]
    step_s = median(without)
    return [
        ratio(CHAPTER, f"{method}: a step / plain torch", [step_s], [plain_s]),
        ratio(CHAPTER, f"{method}: an exchange / raw TCP", [max(0.0, median(having) - step_s)],
              [raw_s], asked=EXCHANGE_ASKED),
    ]  # fmt: skip


def _plain(size: Size) -> Run:
    """As many processes of plain torch as there are workers, at once."""
    with sandbox() as directory:
        (directory / "train.py").write_text(TASK.format(size=tuple(size)))
        (directory / "plain.py").write_text(PLAIN)
        command = [sys.executable, "plain.py", str(STEPS)]
        running = [subprocess.Popen(command, cwd=directory) for _ in range(WORKERS)]
        peaks = dict.fromkeys((str(each.pid) for each in running), 0)
        while any(each.poll() is None for each in running):
            _note(peaks, {str(each.pid): each.pid for each in running})
        if any(each.returncode for each in running):
            raise RuntimeError("plain torch has failed")
        return Run(peaks, _intervals(directory))


def _run(method: str, size: Size) -> Run:
    dlctl = Dlctl()
    with sandbox() as directory:
        (directory / "train.py").write_text(TASK.format(size=tuple(size)))
        file = directory / "job.toml"
        steps = STEPS * WORKERS
        file.write_text(JOB.format(steps=steps, workers=WORKERS, method=METHODS[method]))
        dlctl("start", "--no-wait", str(file))
        try:
            peaks = _watch(list(paths.all_runs())[-1])
        finally:
            dlctl("stop", "--kill", "-q", "-j", str(file))
        print(f"  {method}, {size.model_bytes:,} bytes: {peaks}", file=sys.stderr, flush=True)
        return Run(peaks, _intervals(directory))


def _watch(run: Path) -> dict[str, int]:
    """Waits until the run has finished. Raises RuntimeError if it does not."""
    peaks = dict.fromkeys(["server-0", *(f"worker-{n}" for n in range(WORKERS))], 0)
    while (found := database.read(run)).get("state") not in database.ENDED:
        pids = {row["name"]: row.get("pid") for row in found.get("daemons", [])}
        _note(peaks, {name: pid for name, pid in pids.items() if pid and name in peaks})
    if found["state"] != "finished":
        raise RuntimeError(f"{found['state']}: {found['reason']}")
    return peaks


def _note(peaks: dict[str, int], pids: dict[str, int]) -> None:
    for name, pid in pids.items():
        peaks[name] = max(peaks[name], own_bytes(pid))
    time.sleep(POLL_S)


def _intervals(directory: Path) -> list[list[float]]:
    found = []
    for file in sorted(directory.glob("*.times")):
        times = [float(each) for each in file.read_text().split()]
        found.append([b - a for a, b in pairwise(times)])
    return found


def _raw_exchange_s(nbytes: int) -> float:
    """Seconds until each worker's bytes have been echoed over TCP, all at once."""
    payload, took_s = bytes(nbytes), []

    def exchange(port: str) -> None:
        with socket.create_connection(("127.0.0.1", int(port))) as stream:
            began = time.perf_counter()
            sender = threading.Thread(target=stream.sendall, args=(payload,))
            sender.start()
            read_exactly(stream, memoryview(bytearray(nbytes)))
            sender.join()
            took_s.append(time.perf_counter() - began)

    with echo("tcp", str(nbytes)) as one, echo("tcp", str(nbytes)) as other:
        threads = [threading.Thread(target=exchange, args=(each.address,)) for each in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return max(took_s)
