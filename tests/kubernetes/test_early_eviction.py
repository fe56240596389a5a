"""The control pod is evicted before the run has learned anything: the next one begins it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlctl.control import prepared
from dlctl.launch import local
from dlctl.runs import database

from .manifests import copied

pytestmark = pytest.mark.long

ONCE_S, POLL_S = 50.0, 0.1
WAITS = """def main() -> None:
    while not Path("go").exists():
        threading.Event().wait(0.05)
"""


def control(home: Path) -> subprocess.Popen[bytes]:
    command = ["-P", "-m", "dlctl.ops.kubernetes.pod", "control", "joined.toml", "run.json"]
    state = {"XDG_STATE_HOME": str(home / "known"), "TMPDIR": str(home)}
    return subprocess.Popen([sys.executable, *command], cwd=home, env=os.environ | state)


def test_a_run_without_an_update_begins_again_under_its_name_and_key(tmp_path: Path) -> None:
    copied(tmp_path, ("epochs = 60", "epochs = 1"), ("count = 2", "count = 1"))
    loop = tmp_path / "loop.py"
    waiting = loop.read_text().replace("def main() -> None:\n", WAITS)
    loop.write_text("import threading\nfrom pathlib import Path\n" + waiting)
    made = prepared.prepare("digits-joined", 1, 1, time.time() + 3600.0)
    file = tmp_path / "run.json"
    file.touch(0o600)
    file.write_bytes(made.to_bytes())
    directory = tmp_path / "runs" / made.run
    first = control(tmp_path)
    try:
        deadline = time.monotonic() + ONCE_S
        while not (directory / database.FILE).exists():
            assert time.monotonic() < deadline
            threading.Event().wait(POLL_S)
        first.send_signal(signal.SIGTERM)
        assert first.wait(ONCE_S) == 128 + signal.SIGTERM
        (tmp_path / "go").touch()
        second = control(tmp_path)
        try:
            assert second.wait(ONCE_S) == 0
        finally:
            second.kill()
    finally:
        first.kill()
        if directory.exists():
            local.kill_all(directory)
    assert [each.name for each in directory.parent.iterdir()] == [made.run]
    assert database.read(directory)["state"] == "finished"
    assert (directory / "key").read_bytes() == made.key
