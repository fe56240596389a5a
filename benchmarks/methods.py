"""Every method on the digits, by `dlctl run`: how many of the test pictures it gets wrong, what its
workers push, and how long the run takes.

It is a proof that each trains, and no contest: rates are such that a method does well, and nobody
has searched for the best ones. Four workers, two servers, batches of 16, 20 epochs and a method's
defaults, unless `SETTINGS` has others.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, pushed_bytes, sandbox
from dlctl import registry

CHAPTER = "methods"
TASK = Path(__file__).parents[1] / "examples" / "digits" / "train.py"
WRONG_ASKED = 5.0
"""Per cent of the test pictures."""
SGD = '[optimizer]\nname = "sgd"\nlr = {lr}\n'
OWN_SGD = '[inner]\nname = "sgd"\nlr = {lr}\n'
ADAMW = '[inner]\nname = "adamw"\nlr = 3e-3\n'


class Setting(NamedTuple):
    """What a method is run with."""

    options: str = ""
    """Of `[algorithm]`."""
    sections: str = ""
    """Others of the job file."""
    epochs: int = 20


SETTINGS = {
    "downpour": Setting("push_every_steps = 2", OWN_SGD.format(lr=0.05) + SGD.format(lr=0.05)),
    "sync": Setting("backup_workers = 1", SGD.format(lr=0.2)),
    "dgc": Setting("", SGD.format(lr=0.05)),
    "demo": Setting(epochs=40),
    "local-sgd": Setting("local_steps = 8", OWN_SGD.format(lr=0.1)),
    "diloco": Setting("local_steps = 8", ADAMW),
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
    "ringleader": Setting("", SGD.format(lr=0.1)),
    "epoch-cut": Setting("", SGD.format(lr=0.05)),
}
JOB = """[job]
name = "{name}"
task = "train.py:task"
stop = {{ epochs = {epochs} }}
[algorithm]
name = "{name}"
{options}
{sections}
[servers]
count = 2
[workers]
count = 4
batch_size = 16
"""


def measure(*, quick: bool) -> list[Figure]:
    """quick: the first one only."""
    with sandbox() as directory:
        shutil.copy(TASK, directory)
        names = registry.names("algorithms")[: 1 if quick else None]
        return [_figure(directory, name) for name in names]


def _figure(directory: Path, name: str) -> Figure:
    setting = SETTINGS.get(name, Setting())
    file = directory / f"{name}.toml"
    file.write_text(JOB.format(name=name, **setting._asdict()))
    dlctl, begun = Dlctl(), time.monotonic()
    try:
        dlctl("run", "--fresh", "-q", str(file))
    except RuntimeError as error:
        return Figure(CHAPTER, name, "% wrong", (), asked=WRONG_ASKED, failed=str(error))
    took_s = time.monotonic() - begun
    status = json.loads(dlctl("status", "--json", "-j", str(file)))
    wrong = 100 * (1 - status["evaluation"]["accuracy"])
    detail = f"{pushed_bytes(status) / 1e6:,.1f} MB pushed, {took_s:.0f} s"
    return Figure(CHAPTER, name, "% wrong", (wrong,), asked=WRONG_ASKED, detail=detail)
