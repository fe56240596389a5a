"""`daemons.node` on this machine: requests that are refused, and what is looked at and ended."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemons.node.begin import begin
from daemons.node.end import end
from daemons.node.look import look
from daemons.node.requests import make
from dlctl import __version__
from dlctl.control.keys import CurveKeys
from dlctl.errors import DlctlError, Unreachable, UsageError, VersionMismatch
from dlctl.job import config
from dlctl.launch import answers, remote
from dlctl.util import processes
from dlctl.wire import codec

KEYS = CurveKeys(b"k" * 32)
RUN_ID, AGENT = "digits-7f3a", "agent-1"
JOB = config.JobFile(
    job=config.Job(name="digits", task="train.py:task"), network=config.Network(transport="tcp")
)


@pytest.fixture
def control() -> Iterator[str]:
    """The address of somebody who lets everybody connect, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


@pytest.fixture
def request_(place: Path, control: str) -> dict[str, Any]:
    """As the coordinator would ask to begin an agent."""
    return {
        "verb": "begin", "version": __version__, "protocol": codec.PROTOCOL,
        "run_id": RUN_ID, "agent": AGENT, "incarnation": 1, "dir": str(place),
        "control": control, "secret": KEYS.secret(AGENT),
        "coordinator_key": KEYS.public("coordinator"),
        "job": config.to_dict(JOB),
        "files": {"train.py": base64.b64encode(b"import net").decode(), "sub/net.py": ""},
    }  # fmt: skip


def of(place: Path, **more: Any) -> dict[str, Any]:
    return {"run_id": RUN_ID, "agent": AGENT, "dir": str(place), **more}


def end_it(place: Path, **more: Any) -> dict[str, Any]:
    return end({**of(place), **remote.end_request(RUN_ID, purge=True), **more})


def called(request: object, *libraries: Path) -> answers.CallResult:
    """The whole program, with this on its standard input."""
    places = [*map(str, libraries), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "daemons.node"],
        input=request if isinstance(request, bytes) else json.dumps(request).encode(),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )
    return answers.read("here", done.returncode, done.stdout, done.stderr)


# ---------------------------------------------------------------- what is refused


def test_another_version_is_refused_by_naming_both_before_anything_else(
    request_: dict[str, Any], place: Path
) -> None:
    for different in ({"version": "0.0.1"}, {"protocol": codec.PROTOCOL + 1}):
        with pytest.raises(VersionMismatch) as refused:
            begin({**request_, "agent": "none", **different})
        assert f"dlctl {__version__} with protocol {codec.PROTOCOL}" in refused.value.message
        assert str(next(iter(different.values()))) in refused.value.message
    assert not place.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent": "../agent-1"}, {"agent": "server-0"}, {"agent": None}, {"run_id": ".."},
        {"run_id": "a/b"}, {"run_id": ""}, {"incarnation": True}, {"incarnation": -1},
        {"dir": "relative"}, {"dir": "/tmp/../etc"}, {"dir": "/tmp/\0"}, {"secret": "short"},
        {"secret": ""}, {"coordinator_key": 7}, {"control": "ipc:///tmp/x"}, {"control": "tcp://a"},
        {"control": "tcp://a:99999"}, {"job": {}}, {"job": {"job": {"name": "x"}}}, {"job": []},
        {"files": {}}, {"files": []}, {"files": {"train.py": "no base64!"}},
        {"files": {"train.py": 7}}, {"files": {"../train.py": ""}}, {"files": {"/etc/x.py": ""}},
        {"job": config.to_dict(replace(JOB, job=config.Job(name="x", script="/etc/x.py")))},
        {"job": config.to_dict(replace(JOB, job=config.Job(name="x", script="absent.py")))},
        {"files": {"a\0.py": ""}}, {"files": {"train.py": "", "authorized_keys": ""}},
    ],
    ids=lambda wrong: str(wrong)[:40],
)  # fmt: skip
def test_a_request_that_is_not_one_of_ours_changes_nothing(
    request_: dict[str, Any], place: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as refused:
        begin({**request_, **wrong})
    assert KEYS.secret(AGENT) not in str(refused.value)
    assert not place.exists()


@pytest.mark.parametrize("request_", [b"[]", b"{", b"\xff", {}, {"verb": "system"}, {"verb": 7}])
def test_what_is_no_request_is_answered_with_an_error(request_: object) -> None:
    answer = called(request_)
    assert answer.status == UsageError.exit_code
    assert type(answers.explain(answer)) is UsageError


def test_an_agent_that_could_not_reach_its_coordinator_is_not_started(
    request_: dict[str, Any], place: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(Unreachable) as refused:
        begin({**request_, "control": address})
    assert address in refused.value.message
    assert "firewall" in (refused.value.hint or "")
    assert not place.exists()


def test_a_directory_that_others_can_enter_or_that_is_a_link_is_not_used(
    request_: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    place.mkdir(mode=0o755)
    with pytest.raises(DlctlError, match="mode 0700") as refused:
        begin(request_)
    assert refused.value.where == str(place)
    place.rmdir()
    (tmp_path / "other").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "other")
    with pytest.raises(DlctlError):
        begin(request_)
    assert list((tmp_path / "other").iterdir()) == []


def test_its_directories_are_closed_to_others_whatever_the_umask_says(place: Path) -> None:
    before = os.umask(0)
    try:
        make(place / RUN_ID / AGENT)
    finally:
        os.umask(before)
    made = (place, place / RUN_ID, place / RUN_ID / AGENT)
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3


def test_a_directory_that_cannot_be_made_is_named(request_: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DlctlError) as refused:
        begin({**request_, "dir": str(tmp_path / "file" / "hosts")})
    assert str(tmp_path / "file") in str(refused.value.where)
    assert refused.value.hint


# ---------------------------------------------------------------- an agent comes and goes


def test_an_agent_is_begun_replaced_seen_and_ended(request_: dict[str, Any], place: Path) -> None:
    try:
        first = called(request_)
        assert first.value is not None
        directory = place / AGENT / RUN_ID
        assert first.value["directory"] == str(directory)
        seen = look(of(place))
        assert [(d["name"], d["pid"]) for d in seen["daemons"]] == [(AGENT, first.value["pid"])]
        assert json.loads((directory / "job.json").read_text())["job"]["task"] == (
            f"{directory}/task/train.py:task"
        )
        assert (directory / "task" / "train.py").read_bytes() == b"import net"
        assert (directory / "task" / "sub" / "net.py").exists()

        second = called({**request_, "incarnation": 2, "files": {"train.py": ""}})
        assert second.value is not None
        assert not processes.is_alive(first.value["pid"], first.value["pid_start"])
        assert not (directory / "task" / "sub").exists()
        with pytest.raises(
            UsageError, match="a newer incarnation of this agent, 2, is already running"
        ):
            begin(request_)
        assert processes.is_alive(second.value["pid"], second.value["pid_start"])
        done = end_it(place, grace_s=20, purge=False)
        assert done == {"ended": [AGENT], "left": []}
        # Nobody there has a coordinator to hand the signal on to: it comes to its end in order.
        log = directory / "logs" / f"{AGENT}.2.jsonl"
        assert json.loads(log.read_text().splitlines()[-1])["msg"].startswith("exit 0: ")
    finally:
        end_it(place)
    assert not place.exists()
    assert end_it(place) == {"ended": [], "left": []}


def test_a_module_is_searched_in_the_folder_that_was_sent(
    request_: dict[str, Any], place: Path
) -> None:
    own = config.Job(name="digits", script="pkg/fit.py", module="pkg.fit", args=("-x",))
    job = config.to_dict(replace(JOB, job=own))
    files = {f"pkg/{name}.py": "" for name in ("__init__", "fit")}
    try:
        assert called({**request_, "job": job, "files": files}).value is not None
        directory = place / AGENT / RUN_ID
        here = config.of_stored(json.loads((directory / "job.json").read_text())).job
        assert (here.file, here.args) == (f"{directory}/task/pkg/fit.py", ("-x",))
        assert here.search_path == directory / "task"
    finally:
        end_it(place)


def test_another_run_and_another_agent_are_not_touched(
    request_: dict[str, Any], place: Path
) -> None:
    try:
        other = called({**request_, "agent": "agent-2"})
        assert other.value is not None
        for different in ({"agent": "agent-1"}, {"run_id": "digits-0000", "agent": "agent-2"}):
            assert end_it(place, **different)["ended"] == []
        assert processes.is_alive(other.value["pid"], other.value["pid_start"])
    finally:
        assert len(end_it(place, agent="agent-2")["ended"]) == 1


def test_what_an_agent_says_at_a_failed_start_comes_back(
    request_: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    """As on a machine whose libraries do not fit together: only the daemons need this one."""
    (tmp_path / "zmq.py").write_text('raise ImportError("libzmq.so.5: cannot open")\n')
    answer = called(request_, tmp_path)
    assert answer.value is not None
    error = answers.explain(answer)
    assert "ImportError: libzmq.so.5" in error.message
    log = place / AGENT / RUN_ID / "logs" / f"{AGENT}.1.jsonl"
    assert error.where == f"here:{log}"
    assert look(of(place))["daemons"] == []


def test_looking_at_what_is_not_there_changes_nothing(place: Path) -> None:
    assert look(of(place)) == {"daemons": [], "kept": []}
    assert not place.exists()
