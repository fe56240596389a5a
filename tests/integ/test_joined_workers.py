"""`dlctl join` on this machine, over TCP with keys: workers that only their user has started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest
from workplace import Command, Workplace

SCRIPT = """
import threading
import torch
from torch import nn
from torch.utils.data import TensorDataset
import dlctl

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(256, 2), torch.randn(256, 1))
with dlctl.attach(model, optimizer, evaluate=lambda model: {"fine": 1.0}) as run:
    print("the script trains", flush=True)
    for x, y in run.loader(data, 8):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(0.05)
        run.step(loss=loss)
"""
BEGIN_GROUP = """import dlctl

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
"""
WRAPPED = "wrapped = nn.parallel.DistributedDataParallel(model)\noptimizer = "
NETWORK = '\n[network]\ntransport = "tcp"\n\n[timeouts]\nsilent_s = 6.0\n'
EXPIRED, FOREIGN, REVOKED, NOT_THERE = 78, 10, 77, 5
SLOW_S = 60.0


def write_job(place: Workplace) -> None:
    place.task(SCRIPT)
    place.job(
        workers=1, stop="{ seconds = 600 }", algorithm='name = "async-diloco"\nlocal_steps = 4',
        more=NETWORK, more_workers="max = 2",
    )  # fmt: skip
    file = place.path / "job.toml"
    text = file.read_text().replace('task = "train.py:task"', 'script = "train.py"')
    file.write_text(text.replace('[optimizer]\nname = "adagrad"\nlr = 0.1\n', ""))


@pytest.fixture
def joined(place: Workplace) -> Iterator[Workplace]:
    """A run that bob is invited to."""
    fork_server.import_also("torch._dynamo")  # As the first optimiser of each script does.
    write_job(place)
    place.start()
    assert place.dlctl("keys", "invite", "bob").code == 0
    yield place
    place.dlctl("stop", "--no-checkpoint")


def join(place: Workplace, file: str = "bob.invite", *address: str) -> Command:
    return place.begin("join", *address, "--invite", file, "--", sys.executable, "train.py")


def is_training(place: Workplace, after: int = 0) -> bool:
    row = place.daemon("worker-1")
    return row.get("state") == "running" and row.get("incarnation", 0) > after


def until_training(place: Workplace, after: int = 0) -> int:
    place.until("worker-1 trains", lambda: is_training(place, after), SLOW_S)
    return int(place.daemon("worker-1")["incarnation"])


def processes_of(place: Workplace, part: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if part in words and any(str(place.path) in word for word in words):
            found.append(process)
    return found


def problems(place: Workplace) -> list[Any]:
    return [p["code"] for p in json.loads(place.dlctl("status", "--json").out)["problems"]]


@pytest.mark.timeout(200)
def test_a_worker_joins_is_killed_returns_leaves_and_is_revoked(joined: Workplace) -> None:
    """One run for all of it: each life of the worker takes as long as the start of a run."""
    place = joined
    command = join(place)
    first = until_training(place)
    os.kill(place.pid("worker-1"), signal.SIGKILL)
    second = until_training(place, first)
    for process in processes_of(place, "daemons.guest"):  # Its worker ends with it.
        process.kill()
    command.end()
    place.until("it is gone", lambda: not place.daemon("worker-1"), SLOW_S)
    again = join(place)
    until_training(place, second)
    again.process.send_signal(signal.SIGINT)
    assert again.end(SLOW_S).code == 0, again.err
    assert "the script trains" in again.out
    assert place.run()["state"] == "running"
    place.until("it has left", lambda: not place.daemon("worker-1"))
    assert not [p for p in problems(place) if p not in ("batch-late",)]
    command = join(place)
    until_training(place)
    assert place.dlctl("keys", "revoke", "bob").code == 0
    place.until("it is gone", lambda: not place.daemon("worker-1"), 2.0)
    assert command.end().code == 75, command.err
    assert join(place).end().code == REVOKED
    assert place.run()["state"] == "running"


@pytest.mark.long
def test_a_joined_worker_ends_with_the_run(joined: Workplace) -> None:
    place = joined
    command = join(place)
    until_training(place)
    assert place.dlctl("stop").code == 0
    ended = command.end(SLOW_S)
    assert ended.code == 0, ended.err
    assert place.run()["state"] == "stopped"
    log = place.directory / "logs" / "worker-1.1.jsonl"
    assert "the script trains" in log.read_text()


@pytest.mark.long
def test_what_is_refused_at_once_has_a_code_each_and_disturbs_nothing(joined: Workplace) -> None:
    place = joined
    invited = json.loads((place.path / "bob.invite").read_text())

    def changed(name: str, **fields: Any) -> str:
        file = place.path / name
        file.write_text(json.dumps(invited | fields))
        file.chmod(0o600)
        return name

    foreign = changed("foreign.invite", coordinator=invited["secret"])
    version = changed("version.invite", dlctl="0.0.1")
    commands = {
        FOREIGN: join(place, foreign), 9: join(place, version),
        NOT_THERE: join(place, "bob.invite", "127.0.0.1:9"), 2: join(place, "job.toml"),
    }  # fmt: skip
    ended = {code: command.end(SLOW_S) for code, command in commands.items()}
    assert {code: end.code for code, end in ended.items() if code != 2} == {
        code: code for code in ended if code != 2
    }
    assert ended[2].code != 0
    assert place.run()["state"] == "running"
    assert place.dlctl("keys", "invite", "bob", "--force").code == 1


@pytest.mark.long
def test_an_invitation_is_a_private_file(joined: Workplace) -> None:
    file = Path(joined.path / "bob.invite")
    assert file.stat().st_mode & 0o777 == 0o600
    rows = json.loads(joined.dlctl("keys", "list", "--json").out)["invitations"]
    assert [(row["name"], row["worker"], row["state"]) for row in rows] == [
        ("bob", "worker-1", "invited")
    ]


@pytest.mark.long
def test_an_invitation_expires_by_the_clock_of_the_run(joined: Workplace) -> None:
    place = joined
    ended = place.dlctl("keys", "invite", "eve", "--hours", "0.011")
    assert ended.code == 0
    assert "[network]" in ended.err, "this run listens on 127.0.0.1"
    file = place.path / "eve.invite"
    made = json.loads(file.read_text())
    file.write_text(json.dumps(made | {"expires": 1.0}))  # As if the clock here were fast.
    command = join(place, "eve.invite")
    place.until("eve trains", lambda: place.daemon("worker-2").get("state") == "running", SLOW_S)
    assert command.end(SLOW_S).code == 75, "its time is over for the run, too"
    assert join(place, "eve.invite").end().code == EXPIRED
    file.write_text(json.dumps(made | {"expires": time.time() + 3600.0}))  # And as if slow.
    assert join(place, "eve.invite").end().code == REVOKED
    assert place.run()["state"] == "running"


@pytest.mark.long
def test_a_guest_stays_while_the_coordinator_crashes_and_recovers(joined: Workplace) -> None:
    place = joined
    command = join(place)
    until_training(place)
    for process in (p for p in place.processes() if "daemons.agent" in p.cmdline()):
        process.kill()  # Nobody starts the coordinator again.
    os.kill(place.pid("coordinator"), signal.SIGKILL)
    assert place.dlctl("recover").code == 0
    until_training(place)
    step = place.run()["step"]
    place.until_step(step + 20, SLOW_S)
    assert command.process.poll() is None, command.err


@pytest.mark.long
def test_torchrun_joins_as_one_worker_of_two_processes(joined: Workplace) -> None:
    place = joined
    of_two = SCRIPT.replace("import dlctl\n", BEGIN_GROUP)
    of_two = of_two.replace("evaluate=", "group=True, evaluate=")
    of_two = of_two.replace("model(x)", "wrapped(x)").replace("optimizer = ", WRAPPED, 1)
    (place.path / "two.py").write_text(of_two)
    torchrun = place.path / "torchrun"  # As pip installs it.
    torchrun.write_text(f"#!{sys.executable}\n")
    torchrun.chmod(0o755)
    words = (str(torchrun), "--standalone", "--nproc-per-node", "2", "two.py")
    command = place.begin("join", "--invite", "bob.invite", "--", *words)
    first = until_training(place)
    later = processes_of(place, "daemons.script.later_rank")
    assert len(later) == 1
    later[0].kill()
    until_training(place, first)
    assert len(processes_of(place, "daemons.script.later_rank")) == 1
    assert place.dlctl("stop").code == 0
    ended = command.end(SLOW_S)
    assert ended.code == 0, ended.err
    assert "rank 1 of 2" in ended.out
    assert not processes_of(place, "daemons.script.later_rank")
