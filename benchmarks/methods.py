"""Every method on the digits and on a small GPT, by `dlctl run`: the quality of the model, the
pushed bytes, and the time.

It shows that each method trains, not which one is best: rates work well but are not tuned. Four
workers; on the digits two servers, batches of 16, 20 epochs and a method's defaults, unless
`DIGITS` overrides them. The GPT is `examples/chargpt` with a third of an epoch and batches of 4:
methods that push gradients have AdamW in the servers, those that push deltas have it in the
workers, unless `GPT` overrides it. `sandblaster` reads all samples in each iteration, so it
processes some thirty times as many, in larger batches, which give the same result. `sync+muon` and
the like are `sync` with another optimizer in the servers. `split` needs models of two parties: it
is `examples/split`, on the same digits, and has no GPT.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, pushed_bytes, sandbox
from dlctl import registry

CHAPTER = "methods"
RUN_S_MAX = 900.0
EXAMPLES = Path(__file__).parents[1] / "examples"
MATRIX_OPTIMIZERS = ("muon", "soap", "shampoo")
SPLIT = "split"
WRONG_ASKED = 5.0
"""Per cent of the test images."""
SGD = '[optimizer]\nname = "sgd"\nlr = {lr}\n'
OWN_SGD = '[inner]\nname = "sgd"\nlr = {lr}\n'
MOMENTUM = '[inner]\nname = "sgd"\nlr = {lr}\nmomentum = 0.9\n'
MATRICES = '[optimizer]\nname = "{name}"\nlr = {lr}\n'
ADAMW = '[inner]\nname = "adamw"\nlr = 3e-3\n'
SCHEDULE = """[schedule]
kind = "cosine"
warmup = "10%"
final = 0.1
[gradient]
clip_norm = 1.0
"""


class Setting(NamedTuple):
    """Overrides of a method's job."""

    options: str = ""
    """Keys of `[algorithm]`."""
    sections: str = ""
    """Other sections of the job file."""
    epochs: int = 20
    """For the digits."""
    schedule: str = SCHEDULE
    """For the GPT; with the keys that apply to gradients or deltas only."""
    batch_size: int = 4
    """For the GPT."""


DIGITS = {
    "downpour": Setting("push_every_steps = 2", OWN_SGD.format(lr=0.05) + SGD.format(lr=0.05)),
    "sync": Setting("backup_workers = 1", SGD.format(lr=0.2)),
    "sync+muon": Setting("", MATRICES.format(name="muon", lr=0.02)),
    "sync+soap": Setting("", MATRICES.format(name="soap", lr=0.003)),
    "sync+shampoo": Setting("", MATRICES.format(name="shampoo", lr=0.003)),
    "target-batch": Setting("target_samples = 64", SGD.format(lr=0.2)),
    "dgc": Setting("", SGD.format(lr=0.05)),
    "demo": Setting(epochs=40),
    "local-sgd": Setting("local_steps = 8", OWN_SGD.format(lr=0.1)),
    "diloco": Setting("local_steps = 8", ADAMW),
    "isoloco": Setting(
        "local_steps = 8", ADAMW + '[optimizer]\nname = "isotropic"\nlr = 0.7\nmomentum = 0.6\n'
    ),
    "async-diloco": Setting("local_steps = 10", ADAMW, epochs=30),
    "streaming-diloco": Setting(
        "local_steps = 12\nfragments = 3", ADAMW + '[compression]\nname = "e3m0"\n', epochs=30
    ),
    "decoupled-diloco": Setting(
        "local_steps = 12\nfragments = 3\ndelay_steps = 2", ADAMW, epochs=30
    ),
    "loscar": Setting("local_steps = 8\ndensity = 0.1", OWN_SGD.format(lr=0.1)),
    "sparseloco": Setting("local_steps = 5", ADAMW, epochs=30),
    "easgd": Setting("", OWN_SGD.format(lr=0.1), epochs=60),
    "eamsgd": Setting("", epochs=60),
    "easgd-atomic": Setting("exchange_every_steps = 4", OWN_SGD.format(lr=0.1), epochs=40),
    "fedavg": Setting(
        "fraction = 0.2\nlocal_passes = 2",
        '[inner]\nname = "sgd"\nlr = 0.05\nmomentum = 0.9\n'
        '[data]\nclients = 40\npartition = "dirichlet"\nalpha = 0.5\n',
        epochs=40,
    ),
    "fedbuff": Setting("local_steps = 4\nbuffer_pushes = 4", OWN_SGD.format(lr=0.1), epochs=30),
    "ssp": Setting("staleness = 2", OWN_SGD.format(lr=0.02)),
    "softsync": Setting("", SGD.format(lr=0.1)),
    "dc-asgd": Setting("", SGD.format(lr=0.05)),
    "ringmaster": Setting("", SGD.format(lr=0.05)),
    "ringmaster-lmo": Setting("", '[optimizer]\nname = "lmo"\nlr = 0.01\n'),
    "ringleader": Setting("", SGD.format(lr=0.1)),
    "epoch-cut": Setting("", SGD.format(lr=0.05)),
    "allreduce": Setting("", ADAMW),
    "kfac": Setting("factor_steps = 1\neigen_steps = 10\ndamping = 0.03", MOMENTUM.format(lr=0.05)),
    "gossip": Setting("", ADAMW),
    "noloco": Setting("local_steps = 4", ADAMW),
    "hogwild": Setting("", OWN_SGD.format(lr=0.05)),
    "rows": Setting("", OWN_SGD.format(lr=0.05) + SGD.format(lr=0.05)),
}
GPT_SAMPLES = 12_800
OF_GRADIENTS = '[optimizer]\nname = "adamw"\nlr = 1e-3\nbeta2 = 0.95\nweight_decay = 0.1\n'
OF_WAYS = '[inner]\nname = "adamw"\nlr = 2e-3\nbetas = [0.9, 0.95]\nweight_decay = 0.1\n'
GPT = {
    "sync+muon": Setting("", MATRICES.format(name="muon", lr=0.02)),
    "sync+soap": Setting("", MATRICES.format(name="soap", lr=0.003)),
    "sync+shampoo": Setting("", MATRICES.format(name="shampoo", lr=0.003)),
    "downpour": Setting("overlap = false", '[inner]\nname = "none"\n' + OF_GRADIENTS),
    "epoch-cut": Setting("overlap = false", '[inner]\nname = "none"\n' + OF_GRADIENTS),
    "target-batch": Setting("target_samples = 16", OF_GRADIENTS),
    "dgc": Setting("", SGD.format(lr=0.1)),
    "demo": Setting(),
    "local-sgd": Setting("local_steps = 10", OF_WAYS),
    "diloco": Setting("local_steps = 10", OF_WAYS),
    "isoloco": Setting(
        "local_steps = 10",
        OF_WAYS + '[optimizer]\nname = "isotropic"\nlr = 0.7\nmomentum = 0.6\n',
    ),
    "ringmaster-lmo": Setting("", '[optimizer]\nname = "lmo"\nlr = 0.01\n'),
    "async-diloco": Setting("local_steps = 10", OF_WAYS),
    "streaming-diloco": Setting(
        "local_steps = 12\nfragments = 3", OF_WAYS + '[compression]\nname = "e3m0"\n'
    ),
    "decoupled-diloco": Setting("local_steps = 12\nfragments = 3\ndelay_steps = 2", OF_WAYS),
    "loscar": Setting("local_steps = 10\ndensity = 0.1", OF_WAYS),
    "sparseloco": Setting('local_steps = 10\nmean = "senders"', OF_WAYS),
    "easgd": Setting("", OF_WAYS),
    "eamsgd": Setting(),
    "easgd-atomic": Setting("exchange_every_steps = 10", OF_WAYS),
    "fedavg": Setting("fraction = 0.02", OF_WAYS + "[data]\nclients = 400\n"),
    "fedbuff": Setting("local_steps = 10\nbuffer_pushes = 4", OF_WAYS),
    "ssp": Setting("", OF_WAYS.replace("2e-3", "5e-4")),
    "allreduce": Setting("", OF_WAYS),
    "kfac": Setting("kl_clip = 0.01", MOMENTUM.format(lr=0.05)),
    "gossip": Setting("", OF_WAYS),
    "noloco": Setting("local_steps = 10", OF_WAYS),
    "rows": Setting("overlap = false", '[inner]\nname = "sgd"\nlr = 0.0\n' + OF_GRADIENTS),
    "sandblaster": Setting(
        "iterations = 8", "[data]\nportion_batches = 15\n", schedule="", batch_size=32
    ),
}
DIGITS_JOB = """[job]
name = "{name}"
task = "train.py:task"
stop = {{ epochs = {epochs} }}
[algorithm]
name = "{method}"
{options}
{sections}
{servers}
[workers]
count = 4
batch_size = 16
"""
GPT_JOB = """[job]
name = "gpt-{name}"
task = "task.py:task"
stop = {{ samples = {samples} }}
[algorithm]
name = "{method}"
{options}
{sections}
{schedule}
{servers}
[workers]
count = 4
batch_size = {batch_size}
"""


def measure(*, quick: bool) -> list[Figure]:
    """quick: the first method only."""
    names = [name for name in registry.names("algorithms") if name != SPLIT]
    names += [f"sync+{name}" for name in MATRIX_OPTIMIZERS]
    names = names[: 1 if quick else None]
    with sandbox() as directory:
        for file in ("digits/train.py", "digits/digits.npz", "chargpt/task.py"):
            shutil.copy(EXAMPLES / file, directory)
        figures = [_digits(directory, name) for name in names]
        figures += [] if quick else [_split(directory)]
        return figures + [_gpt(directory, name) for name in names]


def _digits(directory: Path, name: str) -> Figure:
    setting = DIGITS.get(name, Setting())
    job = DIGITS_JOB.format(
        name=_job(name), method=_method(name), servers=_servers(name), **setting._asdict()
    )
    return _digits_with(directory, name, job)


def _digits_with(directory: Path, name: str, job: str) -> Figure:
    figure = Figure(CHAPTER, f"digits, {name}", "% wrong", (), asked=WRONG_ASKED)
    return _measured(figure, directory, job, lambda found: 100 * (1 - found["accuracy"]))


def _split(directory: Path) -> Figure:
    home = directory / SPLIT
    shutil.copytree(EXAMPLES / SPLIT, home, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    return _digits_with(home, SPLIT, (home / "job.toml").read_text())


def _job(name: str) -> str:
    return name.replace("+", "-")


def _method(name: str) -> str:
    """Of "sync+muon": "sync"."""
    return name.partition("+")[0]


def _gpt(directory: Path, name: str) -> Figure:
    is_of_gradients = registry.load("algorithms", _method(name)).shard is not None
    setting = GPT.get(name, Setting("", OF_GRADIENTS if is_of_gradients else OF_WAYS))
    job = GPT_JOB.format(
        name=_job(name), method=_method(name), samples=GPT_SAMPLES, servers=_servers(name),
        **setting._asdict(),
    )  # fmt: skip
    figure = Figure(CHAPTER, f"chargpt, {name}", "nats", ())
    return _measured(figure, directory, job, lambda found: found["val_loss"])


def _servers(name: str) -> str:
    is_needed = registry.load("algorithms", _method(name)).shape.needs_servers
    return "[servers]\ncount = 2" if is_needed else ""


def _measured(
    figure: Figure, directory: Path, job: str, value: Callable[[dict[str, float]], float]
) -> Figure:
    """The figure of one run; value: the metric of its last evaluation."""
    file = directory / f"{figure.what.replace(', ', '-')}.toml"
    file.write_text(job)
    dlctl, begun = Dlctl(limit_s=RUN_S_MAX), time.monotonic()
    try:
        dlctl("run", "--fresh", "-q", str(file))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return replace(figure, failed=str(error))
    took_s = time.monotonic() - begun
    status = json.loads(dlctl("status", "--json", "-j", str(file)))
    detail = f"{pushed_bytes(status) / 1e6:,.1f} MB pushed, {took_s:.0f} s"
    print(f"  {figure.what}: {value(status['evaluation']):.3g}, {detail}", file=sys.stderr)
    return replace(figure, values=(value(status["evaluation"]),), detail=detail)
