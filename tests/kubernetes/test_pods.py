"""The commands of a manifest in pods of this machine: the digits are trained to the end, while a
worker is killed and the control pod is evicted.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlctl.runs import database

from .manifests import copied, objects, text
from .pods import Node, missing

pytestmark = [pytest.mark.root, pytest.mark.long]

CONTROL, WORKERS = "digits-joined-control", "digits-joined-workers"
LONG_S, POLL_S = 120.0, 0.2
SLOW = ("run.step(loss=loss)", "run.step(loss=loss); threading.Event().wait(0.02)")
TERMINATED = 143


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    if why := missing():
        pytest.skip(f"no pods: {why}")
    tmp_path.chmod(0o755)
    file = copied(tmp_path, ("epochs = 60", "epochs = 120"))
    loop = tmp_path / "loop.py"
    loop.write_text("import threading\n" + loop.read_text().replace(*SLOW))
    node = Node(objects(text(file)), tmp_path)
    try:
        yield node
    finally:
        node.close()


class Run:
    """What the control pod has written on its volume."""

    def __init__(self, node: Node) -> None:
        self._runs = node.claim("digits-joined-state") / "runs"
        self._node = node

    @property
    def directory(self) -> Path:
        (found,) = self._runs.iterdir()
        return found

    def row(self) -> dict[str, Any]:
        if not self._runs.exists() or not any(self._runs.glob("*/run.db")):
            return {}
        return database.read(self.directory)

    def training(self) -> int:
        """How many workers train."""
        rows = self.row().get("daemons", [])
        return sum(r["name"].startswith("worker") and r["state"] == "running" for r in rows)

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}: {self.row()}\n{self._node.logs()}"
            threading.Event().wait(POLL_S)


def code(pod: subprocess.Popen[bytes]) -> int:
    return pod.wait(LONG_S)


def test_the_digits_are_trained_to_the_end_whatever_pod_goes(node: Node) -> None:
    run = Run(node)
    workers = [node.start(WORKERS, 10 + index, index=index) for index in range(3)]
    control = node.start(CONTROL, 2)
    run.until("all train", lambda: run.training() == 4)

    node.signal(workers[1], signal.SIGKILL)
    assert code(workers[1]) != 0
    step = run.row()["step"]
    run.until("the others train on", lambda: run.row()["step"] > step + 100)
    workers[1] = node.start(WORKERS, 21, index=1)  # As the Job does.
    run.until("it has come back", lambda: run.training() == 4)

    node.signal(workers[2], signal.SIGTERM)
    assert code(workers[2]) == TERMINATED, "it is to come again: 0 would be the end of its index"
    workers[2] = node.start(WORKERS, 22, index=2)

    step = run.row()["step"]
    node.signal(control, signal.SIGTERM)
    assert code(control) == TERMINATED
    assert all(worker.poll() is None for worker in workers), "they wait"
    control = node.start(CONTROL, 3)  # At another address.
    run.until("all train on", lambda: run.training() == 4 and run.row()["step"] > step + 100)

    assert code(control) == 0, node.logs()
    assert [code(worker) for worker in workers] == [0, 0, 0], node.logs()
    assert run.row()["state"] == "finished"
    verified = node.start(
        CONTROL, 4, args=["dlctl", "verify", "-j", f"/state/runs/{run.directory.name}"]
    )
    assert code(verified) == 0, node.logs()
