"""What ssh is told, and what its words mean. Nothing is started here but a missing ssh."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st

from dlctl import __version__
from dlctl.errors import (
    DlctlError,
    NotPermitted,
    Unreachable,
    UsageError,
    VersionMismatch,
)
from dlctl.job.config import Host
from dlctl.launch import answers, calls, launcher, remote, sshwords
from dlctl.launch.answers import ANSWER_BYTES_MAX, MARK, NO_ANSWER, NO_COMMAND, TOO_MUCH, CallResult
from dlctl.util.hostnames import ssh_fault

H7 = Host(ssh="h7")
SSH = launcher.made("ssh", {})
HOSTILE = [
    "", "-oProxyCommand=touch /tmp/x", "-lroot", "a;reboot", "$(id)", "`id`", "a b", "a\tb", "a\nb",
    "user@host -p 22", "@host", "user@", "user@-v", "-v@host", "user@@host", "a@b@c", "h" * 254,
    "fe80::1%eth0", "[::1]", "[::1]:22", "ssh://h", "h:22", "h/", "h\\", "höst", "h\0", "h'", 'h"',
    ".h", "_h", "h|id", "h>x", "*", "~", "\u202eh", "12::34::56", "::g", ":", "h\n",
]  # fmt: skip
GOOD = [
    "h1", "H1", "10.0.0.7", "gpu-3.example.org", "me@gpu3", "my.name_2@h", "_svc@h", "a..b", "7",
    "2001:db8::7", "me@2001:DB8::7", "::1", "::ffff:10.0.0.1", "h" * 253,
]  # fmt: skip


# ---------------------------------------------------------------- what ssh is told


def test_the_command_is_the_systems_ssh_that_asks_nobody_and_forwards_nothing() -> None:
    words = ["/opt/my python", "-P", "-m", "daemons.node"]
    assert sshwords.argv(Host(ssh="me@h7"), words, "/run/x/%C") == [
        "ssh",
        "-T",
        "-oBatchMode=yes",
        "-oConnectTimeout=5",
        "-oServerAliveInterval=5",
        "-oServerAliveCountMax=3",
        "-oForwardAgent=no",
        "-oForwardX11=no",
        "-oClearAllForwardings=yes",
        "-oPermitLocalCommand=no",
        "-oRemoteCommand=none",
        "-oControlMaster=auto",
        "-oControlPath=/run/x/%C",
        "-oControlPersist=60",
        "--",
        "me@h7",
        "'/opt/my python' -P -m daemons.node",
    ]


def test_without_a_place_for_shared_connections_each_call_has_its_own() -> None:
    options = sshwords.argv(H7, ["true"], "")
    assert "-oControlMaster=no" in options
    assert "-oControlPath=none" in options


def test_a_path_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert sshwords.control_path() == ""


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_host_is_refused_before_ssh_starts(name: str) -> None:
    fault = ssh_fault(name)
    assert fault
    with pytest.raises(UsageError) as refused:
        SSH.ask({"agent-1": Host(ssh=name)}, {}, 1.0)
    assert fault in refused.value.message
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("name", GOOD)
def test_names_addresses_and_users_are_hosts(name: str) -> None:
    assert ssh_fault(name) == ""
    assert sshwords.argv(Host(ssh=name), ["true"], "")[-3:] == ["--", name, "true"]


def test_a_fault_says_what_is_wrong() -> None:
    assert "dash" in ssh_fault("-oProxyCommand=x")
    assert "254 characters" in ssh_fault("h" * 254)
    assert "port in ~/.ssh/config" in ssh_fault("[::1]:22")
    assert "empty" in ssh_fault("")


@given(st.lists(st.text(st.characters(exclude_characters="\0")), min_size=1))
@times(2)
def test_words_are_one_word_that_a_shell_reads_back(words: list[str]) -> None:
    command = sshwords.argv(H7, words, "")
    assert shlex.split(command[-1]) == words
    assert command[-2] == "h7"


def test_python_is_the_one_of_the_host_or_where_it_is_here() -> None:
    assert calls.node_words(H7)[0] == sys.executable
    assert calls.node_words(Host(ssh="h", python="/opt/py"))[0] == "/opt/py"
    # A login begins at home, and no shell has to know what "~" is.
    assert calls.node_words(Host(ssh="h", python="~/venv/bin/python"))[0] == "./venv/bin/python"


def test_a_machine_without_ssh_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = SSH.ask({"agent-1": H7}, remote.look_request("digits-7f3a"), 5.0)
    error = SSH.explain(found["agent-1"])
    assert found["agent-1"].status == NO_COMMAND
    assert "ssh" in error.message
    assert "openssh-client" in (error.hint or "")


# ---------------------------------------------------------------- what comes back


def output(value: object, before: bytes = b"", after: bytes = b"") -> bytes:
    return before + MARK + b"\n" + json.dumps(value).encode() + b"\n" + after


def test_an_answer_is_found_behind_whatever_a_login_prints() -> None:
    answer = output({"pid": 7}, b"Welcome to h7!\n{}\n\xff\x00", b"logout\n")
    found = answers.read("h7", 0, answer, b"motd\n")
    assert (found.value, found.words, found.is_good) == ({"pid": 7}, "motd\n", True)
    assert answers.value_of(found) == {"pid": 7}


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"Welcome!\n", MARK, MARK + b"\n", MARK + b'\n{"cut": ', MARK + b'\n{"no": "end"}',
        output([1]), output("text"), MARK + b"\n" + b"[" * 100_000 + b"\n", b"{}\n",
    ],
)  # fmt: skip
def test_what_is_no_answer_becomes_an_error_with_the_words_that_came(answer: bytes) -> None:
    found = answers.read("h7", 0, answer, b"ssh: a word\n")
    assert found.value is None
    error = SSH.explain(found)
    assert "h7" in error.message
    assert error.where == "h7"
    assert "ssh: a word" in found.words


def test_an_error_of_the_other_end_is_raised_as_what_it_was_there() -> None:
    sent = answers.as_value(VersionMismatch("other version", where="/opt/dlctl", hint="install"))
    found = answers.read("h7", 9, output(sent), b"")
    assert not found.is_good
    with pytest.raises(VersionMismatch, match="h7") as raised:
        answers.value_of(found)
    assert (raised.value.where, raised.value.hint) == ("h7:/opt/dlctl", "install")


@pytest.mark.parametrize(
    "error",
    [["SystemExit", "m", "", ""], ["annotations", "m", "", ""], ["x"], None, 7, [1, 2, 3, 4]],
)
def test_only_our_own_errors_are_taken_over(error: object) -> None:
    found = SSH.explain(answers.read("h7", 1, output({"error": error}), b""))
    assert type(found) is DlctlError


CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Host key verification failed.
"""
MEANT = [
    (255, "ssh: Could not resolve hostname h7: Name or service not known", Unreachable,
     "the name h7 cannot be resolved", "ssh h7 true"),
    (255, "ssh: connect to host h7 port 22: Connection refused", Unreachable,
     "cannot be reached (ssh: connect to host h7 port 22: Connection refused)", "ssh h7 true"),
    (255, "ssh: connect to host h7 port 22: Connection timed out", Unreachable,
     "timed out", "ssh h7 true"),
    (255, "Timeout, server h7 not responding.", Unreachable, "not responding", "ssh h7 true"),
    (255, "kex_exchange_identification: Connection closed by remote host", Unreachable,
     "closed by remote host", "ssh h7 true"),
    (255, "Host key verification failed.", NotPermitted, "host key of h7 is not known",
     "fingerprint"),
    (255, CHANGED, NotPermitted, "the host key of h7 has changed", "ssh-keygen -R h7"),
    (255, "root@h7: Permission denied (publickey).", NotPermitted, "refuses the login",
     "ssh-copy-id h7"),
    (255, "Control socket connect(x): Connection refused\nroot@h7: Permission denied (publickey).",
     NotPermitted, "refuses the login", "BatchMode"),
    (255, "Bad owner or permissions on /root/.ssh/config", DlctlError, "Bad owner", "ssh h7"),
    (127, "bash: line 1: /opt/py: No such file or directory", DlctlError, "not have this Python",
     "set python"),
    (126, "sh: 1: /opt/py: Permission denied", DlctlError, "not have this Python", "set python"),
    (2, "Unknown option: -P\nusage: python3 [option] ...", DlctlError, "too old: dlctl needs 3.11",
     "set python"),
    (1, "/opt/py: Error while finding module specification for 'daemons.node' "
     "(ModuleNotFoundError: No module named 'daemons')", DlctlError, "has no dlctl",
     f"install dlctl {__version__}"),
    (1, "ModuleNotFoundError: No module named 'zmq'", DlctlError, "lacks a dependency",
     f"install dlctl {__version__}"),
    (NO_ANSWER, "", Unreachable, "not answered in time", "ssh h7 true"),
    (TOO_MUCH, "", DlctlError, f"more than {ANSWER_BYTES_MAX:,} bytes", "ssh h7 true"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "words", "kind", "meaning", "hint"), MEANT)
def test_words_of_ssh_are_shown_and_explained(
    status: int, words: str, kind: type[DlctlError], meaning: str, hint: str
) -> None:
    error = SSH.explain(CallResult("h7", None, status, words))
    assert type(error) is kind
    assert meaning in error.message
    assert error.where == "h7"
    assert hint in (error.hint or "")


def test_foreign_words_cannot_steer_a_terminal_and_are_not_endless() -> None:
    error = SSH.explain(CallResult("h7", None, 255, "\x1b]0;evil\x07" + "x" * 10_000))
    assert "\x1b" not in error.message
    assert len(error.message) < 500
