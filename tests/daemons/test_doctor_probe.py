"""The other end of `dlctl doctor`, as a process here: questions, answers, and its end."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemons.node import examine, flood
from dlctl.errors import DlctlError, UsageError
from dlctl.job.config import Host
from dlctl.launch.session import Session, here

LOOPBACK = "127.0.0.1"
TOKEN = secrets.token_hex(32)
ASK_S = 30.0


@pytest.fixture
def probe() -> Iterator[Session]:
    session = here(Host())
    yield session
    session.close()


def listen(session: Session, token: str = TOKEN, **ports: int) -> list[dict[str, Any]]:
    own = {"ssh": "", "data": "", "control": "", "bind": LOOPBACK}
    asked = {"verb": "listen", "token": token, "ports": ports, **own}
    return session.ask(asked, ASK_S)["places"]


def reach(session: Session, port: int, token: str = TOKEN, measured: bool = False) -> Any:
    target = {"address": LOOPBACK, "port": port, "token": token, "is_measured": measured}
    return session.ask({"verb": "reach", "targets": [target]}, ASK_S)["reached"][0]


@contextmanager
def occupied() -> Iterator[int]:
    """A port of this process, which says nothing."""
    with socket.create_server((LOOPBACK, 0)) as own:
        yield own.getsockname()[1]


def test_one_that_listens_is_reached_and_measured_by_who_has_the_token(probe: Session) -> None:
    (place,) = listen(probe, **{"server-0": 0})
    assert (place["name"], place["address"], place["told"]) == ("server-0", LOOPBACK, LOOPBACK)
    other = here(Host())
    try:
        found = reach(other, place["port"], measured=True)
        stranger = reach(other, place["port"], token=secrets.token_hex(32))
    finally:
        other.close()
    assert 0 < found["round_trip_s"] < 0.1
    assert found["up_bytes_per_s"] > 10e6
    assert found["down_bytes_per_s"] > 10e6
    assert stranger["kind"] == "stranger"
    probe.close()
    with pytest.raises(ConnectionRefusedError), socket.create_connection((LOOPBACK, place["port"])):
        pytest.fail("it listens without its session")


def test_who_does_not_know_the_token_hears_nothing(probe: Session) -> None:
    (place,) = listen(probe, **{"server-0": 0})
    for said in (b"", b"GET / HTTP/1.0\r\n\r\n", b"f" * flood.TOKEN_BYTES, b"x" * 10_000):
        with socket.create_connection((LOOPBACK, place["port"])) as visitor:
            visitor.settimeout(5.0)
            heard = b""
            try:
                visitor.sendall(said)
                visitor.shutdown(socket.SHUT_WR)
                heard = visitor.recv(100)
            except OSError:
                pass  # It is closed while there is something of ours that nobody has read.
            assert heard == b""


def test_who_has_a_port_is_named_and_an_address_of_nobody_is_refused(probe: Session) -> None:
    with occupied() as port:
        (place,) = listen(probe, **{"server-0": port})
    assert place["kind"] == "taken"
    assert place["owner"]["pid"] == psutil.Process().pid
    asked = {"verb": "listen", "token": TOKEN, "ports": {"server-0": 0}}
    asked |= {"ssh": "", "data": "", "control": ""}
    for bind, kind, words in (
        ("203.0.113.7", "not ours", "Cannot assign requested address"),
        ("fe80::1%nowhere", "", "Name or service not known"),
    ):
        (place,) = probe.ask({**asked, "bind": bind}, ASK_S)["places"]
        assert (place["kind"], place["words"]) == (kind, words)


def test_a_closed_port_and_one_of_somebody_else_are_told_apart(probe: Session) -> None:
    with occupied() as port, socket.create_server((LOOPBACK, 0)) as talker:
        answered = threading.Thread(target=_say_hello, args=(talker,))
        answered.start()
        assert reach(probe, talker.getsockname()[1])["kind"] == "stranger"
        answered.join()
    assert reach(probe, port)["kind"] == "refused"


def _say_hello(talker: socket.socket) -> None:
    connection, _ = talker.accept()
    with connection:
        connection.sendall(b"SSH-2.0-nobody\r\n")
        connection.recv(100)


def test_it_answers_after_a_question_that_it_does_not_have(probe: Session) -> None:
    for wrong in ({"verb": "purge"}, {}, {"verb": "listen", "token": "short"}):
        with pytest.raises(UsageError):
            probe.ask(wrong, ASK_S)
    assert probe.ask({"verb": "hello"}, ASK_S)["at"] > 0


def test_what_there_is_here_is_found_and_nothing_is_made(probe: Session, tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    asked = {"verb": "examine", "dir": str(place), "folder": "", "state_dir": ""}
    facts = probe.ask({**asked, "needs_torch": False}, ASK_S)
    assert facts["directory"]["problem"] == ""
    assert facts["directory"]["free_bytes"] > 0
    assert (facts["torch"], facts["states"]) == ({}, None)
    assert facts["cores"] >= 1
    assert "127.0.0.1" in facts["addresses"]["lo"]
    assert list(tmp_path.iterdir()) == []
    place.mkdir(parents=True, mode=0o755)
    open_to_all = probe.ask({**asked, "needs_torch": False}, ASK_S)["directory"]
    assert "mode 0700" in open_to_all["problem"]
    assert "chmod 700" in open_to_all["fix"]


@pytest.mark.parametrize("why", ["not there", "not a directory", "not executable"])
def test_a_gpu_tool_that_cannot_be_reached_is_no_problem(why, tmp_path, monkeypatch) -> None:
    place = tmp_path / "bin"
    if why == "not a directory":
        place.touch()
    elif why == "not executable":
        place.mkdir()
        (place / "nvidia-smi").touch(mode=0o644)
    monkeypatch.setenv("PATH", str(place))
    assert examine._gpu() == {"devices": [], "problem": ""}


def test_paths_that_would_be_refused_are_refused_here_by_their_names(probe: Session) -> None:
    asked = {"verb": "examine", "dir": "", "folder": "", "state_dir": "", "needs_torch": False}
    for wrong in ({"dir": "/tmp/../etc"}, {"folder": "runs"}, {"state_dir": "states"}):
        with pytest.raises(UsageError, match=str(next(iter(wrong)))):
            probe.ask({**asked, **wrong}, ASK_S)


def test_it_ends_with_its_input_and_leaves_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "daemons.node"], stdin=-1, stdout=-1, stderr=-1
    ) as process:
        out, err = process.communicate(b'{"verb": "hello"}\n[]\nno json\n', timeout=20)
    lines = out.splitlines()
    assert (process.returncode, err, len(lines)) == (UsageError.exit_code, b"", 4)
    assert b"UsageError" in lines[2]
    assert b"it has to be one JSON object" in lines[2]
    assert b"not a request: " in lines[3]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo Welcome; echo who are you >&2; exit 3", "who are you"),
        ("exec yes Welcome", "more than"),
        ("exec sleep 60", "not answered in time"),
        ("echo '=== dlctl answers ==='; echo '[1]'; sleep 60", "does not know"),
    ],
)
def test_a_machine_that_does_not_answer_as_it_should_is_told_in_its_own_words(
    script: str, words: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    session = here(Host(python=str(python)))
    with pytest.raises(DlctlError, match=words):
        session.ask({"verb": "hello"}, 1.0)
    with pytest.raises(DlctlError, match=words):
        session.ask({"verb": "hello"}, 1.0)
    session.close()


@pytest.mark.parametrize(
    ("files", "kills", "removes_ipc"),
    [
        ({}, False, True),
        ({"logind.conf": "[Login]\n#KillUserProcesses=yes\nRemoveIPC=no\n"}, False, False),
        ({"logind.conf": "KillUserProcesses = yes\n"}, True, True),
        (
            {"logind.conf": "KillUserProcesses=yes\n", "logind.conf.d/a.conf": "RemoveIPC=0\n"},
            True,
            False,
        ),
        ({"logind.conf": "KillUserProcesses=yes\n", "linger/ann": ""}, False, False),
    ],
)
def test_what_systemd_does_at_a_logout_is_read_from_its_files(
    files: dict[str, str],
    kills: bool,
    removes_ipc: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(examine, "LOGIND", tmp_path / "logind.conf")
    monkeypatch.setattr(examine, "LINGER", tmp_path / "linger")
    monkeypatch.setattr(examine, "BOOTED", tmp_path)
    monkeypatch.setattr(examine, "_user", lambda: "ann")
    monkeypatch.setattr(examine.os, "getuid", lambda: 1000)
    assert examine._logout() == {"kills": kills, "removes_ipc": removes_ipc}
    monkeypatch.setattr(examine.os, "getuid", lambda: 0)
    assert examine._logout() == {"kills": False, "removes_ipc": False}
