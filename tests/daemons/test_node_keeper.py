"""The keeper of a node of a Slurm job, when not all goes as it should."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemons.node import keep, requests
from daemons.node.keep import Keeper
from dlctl import __version__
from dlctl.job import config
from dlctl.launch import answers, local, orderfiles, slurmscript
from dlctl.launch.slurmnode import SlurmNode
from dlctl.wire import codec

AGENT, RUN_ID = "agent-1", "digits-7f3a"
NODE = {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "17"}
JOB = config.JobFile(
    job=config.Job(name="digits", task="train.py:task"), network=config.Network(transport="tcp")
)


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """The directory that the node shares with the coordinator."""
    orderfiles.make(tmp_path / "orders" / "run", "")
    return tmp_path / "orders" / "run"


@pytest.fixture
def control() -> Iterator[str]:
    """The address of somebody who lets everybody connect, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def keeper(orders: Path) -> Keeper:
    return Keeper(orders, SlurmNode(NODE, []))


def place_order(orders: Path, incarnation: int, **more: Any) -> None:
    where = {"run_id": RUN_ID, "agent": AGENT, "dir": str(orders.parent.parent / "node")}
    value = {"incarnation": incarnation, **where, **more}
    orderfiles.write(orderfiles.order(orders, AGENT), value)


def test_an_order_that_cannot_be_carried_out_is_answered(
    orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place_order(orders, 1)
    monkeypatch.setattr(sys, "executable", "/no/python")
    keeper(orders)._take_order()
    answer = orderfiles.read(orderfiles.answer(orders, AGENT))
    assert (answer["state"], answer["incarnation"], answer["status"]) == ("failed", 1, 1)
    error = answers.explain(answers.CallResult("n1", answer["value"], 1, ""))
    assert "n1:" in error.message
    assert "/no/python" in error.message


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What starts an agent takes until this file is there, and fails then."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nwhile [ ! -e "$0.go" ]; do sleep 0.02; done\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return tmp_path / "python.go"


def ordered_to_kill(orders: Path, incarnation: int) -> None:
    orderfiles.write(orderfiles.kill(orders, AGENT), {"incarnation": incarnation})


def end_of_begin(ours: Keeper) -> int:
    """Its exit code; the keeper has seen it."""
    begin = ours._begin
    assert begin is not None
    status = begin.wait(10.0)
    ours._look_at_begin()
    return status


def answered(orders: Path) -> tuple[str, int]:
    answer = orderfiles.read(orderfiles.answer(orders, AGENT))
    return answer["state"], answer["incarnation"]


@pytest.mark.parametrize(("killed", "status", "state"), [(1, 3, "failed"), (2, -9, "ended")])
def test_an_order_to_kill_reaches_the_agent_that_it_names_and_no_newer_one(
    orders: Path, slow: Path, killed: int, status: int, state: str
) -> None:
    place_order(orders, 2)
    ours = keeper(orders)
    ours._take_order()
    ordered_to_kill(orders, killed)
    ours._take_kill()
    slow.touch()
    assert end_of_begin(ours) == status
    assert answered(orders) == (state, 2)
    ours._take_order()
    assert ours._begin is None


@pytest.mark.parametrize("comes_first", ["order", "kill"])
@pytest.mark.parametrize("attempt", [0, 1])
def test_an_order_that_was_killed_before_it_was_seen_starts_nothing_and_the_next_one_does(
    orders: Path, slow: Path, comes_first: str, attempt: int
) -> None:
    """Neither by this keeper nor by one that takes its place, nor when the job is run again."""
    ours = keeper(orders)
    if comes_first == "order":
        place_order(orders, 2)
    ordered_to_kill(orders, 2)
    ours._take_kill()
    assert answered(orders) == ("ended", 2)
    place_order(orders, 2)
    next_one = Keeper(orders, SlurmNode({**NODE, "SLURM_RESTART_COUNT": str(attempt)}, []))
    for each in (ours, next_one):
        each._take_kill()
        each._take_order()
        assert (each._begin, answered(orders)) == (None, ("ended", 2))
    place_order(orders, 3)
    ours._take_order()
    assert answered(orders) == ("begins", 3)
    ours._take_kill()
    slow.touch()
    assert end_of_begin(ours) == 3, "it is not killed"


def test_an_agent_that_was_being_started_when_its_order_was_killed_is_killed_once_it_is_seen(
    orders: Path, slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, killed = list[local.Living](), list[local.Living]()
    monkeypatch.setattr(keep, "agents", lambda directory: [*there])
    monkeypatch.setattr(keep, "kill", killed.extend)
    place_order(orders, 2)
    ours = keeper(orders)
    ours._take_order()
    ordered_to_kill(orders, 2)
    ours._take_kill()
    end_of_begin(ours)
    begun, newer = (local.Living("agent", AGENT, number, 0, "") for number in (2, 3))
    there[:] = [begun, newer]
    ours._end_killed()
    assert killed == [begun]
    place_order(orders, 3)
    ours._take_order()
    ours._end_killed()
    assert killed == [begun]
    slow.touch()
    end_of_begin(ours)


# ---------------------------------------------------------------- what is left on the node


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """Those that an agent of this run has on the node."""
    directory = tmp_path / "node" / AGENT / RUN_ID
    requests.make(directory)
    (directory / "shard").touch()
    before = signal.getsignal(signal.SIGTERM)
    yield directory / "shard"
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("node", "ends_for_good", "is_left"),
    [("n1", True, False), ("n1", False, True), ("n2", True, True)],
)
def test_a_keeper_without_an_order_removes_what_an_earlier_attempt_has_left_on_its_own_node(
    orders: Path, files: Path, slow: Path, node: str, ends_for_good: bool, is_left: bool
) -> None:
    place_order(orders, 1)
    first = keeper(orders)
    first._take_order()
    slow.touch()
    end_of_begin(first)
    orderfiles.order(orders, AGENT).unlink()
    again = SlurmNode({**NODE, "SLURMD_NODENAME": node, "SLURM_RESTART_COUNT": "1"}, [])
    again.returns = lambda: not ends_for_good  # type: ignore[method-assign]
    second = Keeper(orders, again)
    second._is_terminated = True
    second._leave("the job ends")
    assert files.exists() == is_left


@pytest.mark.parametrize("known", [{}, {"node": "n1", "place": {"run_id": "..", "dir": "/"}}])
def test_a_keeper_that_knows_of_no_order_ends_and_removes_nothing(
    orders: Path, files: Path, known: dict[str, Any]
) -> None:
    orderfiles.write(orderfiles.answer(orders, AGENT), known)
    ours = keeper(orders)
    ours._leave("the run is over")
    assert files.exists()


# ---------------------------------------------------------------- what it depends on


def test_orders_that_cannot_be_looked_at_are_not_the_end_of_the_run(orders: Path) -> None:
    ours = keeper(orders)
    assert ours._why_over() == ""
    orders.rmdir()
    orders.symlink_to(orders)
    assert ours._why_over() == ""
    orders.unlink()
    assert ours._why_over()


@pytest.mark.long
def test_a_keeper_that_cannot_answer_goes_on_and_leaves_nothing(
    orders: Path, tmp_path: Path, control: str
) -> None:
    orderfiles.answer(orders, AGENT).mkdir()  # Nothing can take its place.
    place_order(
        orders, 1, verb="begin", version=__version__, protocol=codec.PROTOCOL, control=control,
        secret="", coordinator_key="", job=config.to_dict(JOB),
        files={"train.py": base64.b64encode(b"task = 1").decode()},
    )  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "daemons.node.keep", slurmscript.NODE, str(orders)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ, **NODE},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "cannot report begins" in process.stdout.readline()
        assert "cannot report up" in process.stdout.readline()
        directory = tmp_path / "node" / AGENT / RUN_ID
        assert (directory / "logs").exists()
        (orders / orderfiles.OVER).touch()
        assert "the keeper exits: the run is over" in process.stdout.read()
    assert process.returncode == 0
    assert not (tmp_path / "node").exists()
