"""The keeper of a node of a Slurm job, when not all goes as it should."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemons.node.keep import Keeper
from dlctl import __version__
from dlctl.job import config
from dlctl.launch import answers, orderfiles, slurmscript
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
    said = orderfiles.read(orderfiles.answer(orders, AGENT))
    assert (said["state"], said["incarnation"], said["status"]) == ("failed", 1, 1)
    error = answers.explain(answers.CallResult("n1", said["value"], 1, ""))
    assert "n1:" in error.message
    assert "/no/python" in error.message


@pytest.mark.parametrize(("killed", "status"), [(1, 3), (2, -9)])
def test_an_order_to_kill_reaches_the_agent_that_it_names_and_no_newer_one(
    orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int, status: int
) -> None:
    slow = tmp_path / "python"
    slow.write_text('#!/bin/sh\nwhile [ ! -e "$0.go" ]; do sleep 0.02; done\nexit 3\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    place_order(orders, 2)
    ours = keeper(orders)
    ours._take_order()
    orderfiles.write(orderfiles.kill(orders, AGENT), {"incarnation": killed})
    ours._take_kill()
    assert not orderfiles.kill(orders, AGENT).exists()
    (tmp_path / "python.go").touch()
    assert ours._begin is not None
    assert ours._begin.wait(10.0) == status
    ours._look_at_begin()
    assert orderfiles.read(orderfiles.answer(orders, AGENT))["status"] == status


def test_orders_that_cannot_be_looked_at_are_not_the_end_of_the_run(orders: Path) -> None:
    ours = keeper(orders)
    assert ours._why_over() == ""
    orders.rmdir()
    orders.symlink_to(orders)
    assert ours._why_over() == ""
    orders.unlink()
    assert ours._why_over()


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
