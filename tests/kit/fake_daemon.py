"""A process that looks like a daemon of a run, and does nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlctl.launch import base


@contextmanager
def orphan(directory: Path, name: str, incarnation: int) -> Iterator[subprocess.Popen]:
    """A worker of this run that nobody has put on record."""
    package = directory.parent / "code" / "daemons"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "worker.py").write_text("import signal\nprint(flush=True)\nsignal.pause()\n")
    command = base.argv("worker", directory, name, incarnation, "")
    paths = {**os.environ, "PYTHONPATH": str(package.parent)}
    with subprocess.Popen(command, stdout=-1, env=paths, start_new_session=True) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()
