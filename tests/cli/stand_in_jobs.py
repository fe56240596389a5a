"""Commands that start jobs, and what they leave; the coordinator is a stand-in.

The stand-in is a real process, `stand_in/daemons/coordinator.py`, that plays the scenes it is told.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlctl.runs import database

STAND_IN = Path(__file__).parent / "stand_in"
JOB = """
[job]
name = "quick"
task = "train.py:task"
stop = { epochs = 1 }
[optimizer]
name = "sgd"
lr = 0.1
[workers]
count = 2
[timeouts]
grace_s = 5.0
"""


def the_run(own_place: Path) -> dict:
    (directory,) = (own_place / "runs").iterdir()
    return database.read(directory)


@contextmanager
def attached(*arguments: str) -> Iterator[subprocess.Popen]:
    """A command in a process of its own, which can get signals; killed if it hangs."""
    code = "import sys; from dlctl.cli import app as main; sys.exit(main.run(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=-1, stderr=-1, text=True
    ) as process:
        timer = threading.Timer(30, process.kill)
        timer.start()
        yield process
        timer.cancel()


def until(stream, text: str) -> str:
    """Read lines until one has `text` in it."""
    read = ""
    for line in stream:
        read += line
        if text in line:
            break
    return read
