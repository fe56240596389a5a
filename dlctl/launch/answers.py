"""Parses the result of a call to another machine: an answer in JSON, or output that explains why
there is none.

`python -m daemons.node` prints a marker line (`MARK`) and its answer in the next line: a login
shell may print anything before that. The standard error of ssh and of the remote Python is shown
unchanged; dlctl's error only adds what it means.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from dlctl import errors
from dlctl.errors import DlctlError, NotPermitted, Unreachable
from dlctl.util.text import escape

MARK = b"=== dlctl answers ==="
ANSWER_BYTES_MAX = 1 << 20
SHOWN_CHARS_MAX = 300
"""Of one line of other programs' output in an error."""
NO_SSH, NO_ANSWER, TOO_MUCH, NOT_OURS = -1001, -1002, -1003, -1004
"""Statuses that no process has: ssh could not be started; it was killed after the timeout, because
its output was too long, or because its output is not an answer of dlctl."""
SSH_FAILED = 255
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a shell."""


class Answer(NamedTuple):
    """The result of one call to another machine."""

    host: str
    """As in the job file."""
    value: dict[str, Any] | None
    """The answer of `daemons.node`; None: none was received."""
    status: int
    """The exit code of ssh, which is the remote one or `SSH_FAILED`, or one of the above."""
    words: str
    """Standard error of ssh and of the remote command; without a value, also standard output."""

    @property
    def is_good(self) -> bool:
        """Whether the call succeeded."""
        return self.value is not None and "error" not in self.value

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.words.splitlines() if line.strip()]


def read(host: str, status: int, output: bytes, words: bytes) -> Answer:
    """The answer in standard output: the line after the mark."""
    said = words.decode(errors="replace")
    _, mark, rest = output.rpartition(MARK + b"\n")
    line, end, _ = rest.partition(b"\n")
    try:
        value = json.loads(line) if mark and end else None
    except (ValueError, RecursionError):
        value = None
    if type(value) is dict:
        return Answer(host, value, status, said)
    # `_last` shows the last line, so standard error (ssh, the shell or Python) goes last.
    return Answer(host, None, status, f"{output[:2000].decode(errors='replace')}\n{said}".strip())


def value_of(answer: Answer) -> dict[str, Any]:
    """The value of a successful answer. Raises DlctlError (see `explain`) for any other."""
    if answer.value is None or not answer.is_good:
        raise explain(answer)
    return answer.value


def as_value(error: DlctlError) -> dict[str, Any]:
    """An error as the remote end sends it."""
    kind = type(error).__name__
    return {"error": [kind, error.message, error.where or "", error.hint or ""]}


def explain(answer: Answer) -> DlctlError:
    """What failed, where, why (if known), and what to do next."""
    if answer.value is not None:
        return _remote_error(answer.host, answer.value.get("error"))
    if answer.status in _OURS:
        return _OURS[answer.status](answer.host, answer.words)
    if answer.status == SSH_FAILED:
        return _ssh_error(answer)
    return _shell_error(answer)


# ---------------------------------------------------------------- from the remote end


def _remote_error(host: str, error: Any) -> DlctlError:
    if type(error) is not list or [type(part) for part in error] != [str] * 4:
        return _not_ours(host, "")
    kind, message, where, hint = error
    known = getattr(errors, kind, None)
    is_ours = isinstance(known, type) and issubclass(known, DlctlError)
    raised: type[DlctlError] = known if is_ours else DlctlError  # type: ignore[assignment]
    place = f"{host}:{where}" if where else host
    return raised(f"{host}: {message}", where=escape(place), hint=hint or None)


# ---------------------------------------------------------------- from ssh


def _no_ssh(host: str, words: str) -> DlctlError:
    return DlctlError(
        f"this machine has no ssh command, so {host} cannot be reached",
        where="this machine",
        hint="install OpenSSH's client, as with: apt install openssh-client",
    )


def _no_answer(host: str, words: str) -> DlctlError:
    text = f"{host} has not answered in time{_last(words)}"
    return Unreachable(text, where=host, hint=_try(host))


def _too_much(host: str, words: str) -> DlctlError:
    return DlctlError(
        f"{host} has sent more than {ANSWER_BYTES_MAX:,} bytes: this is not an answer of dlctl",
        where=host,
        hint=f"see what a login prints there: ssh {host} true",
    )


def _not_ours(host: str, words: str) -> DlctlError:
    text = f"{host} has sent an answer that this version of dlctl does not know{_last(words)}"
    return DlctlError(text, where=host)


_OURS = {NO_SSH: _no_ssh, NO_ANSWER: _no_answer, TOO_MUCH: _too_much, NOT_OURS: _not_ours}


def _unknown_name(host: str, words: str) -> DlctlError:
    return Unreachable(
        f"the name {host} cannot be resolved{_last(words)}",
        where=host,
        hint=f"correct ssh in [[hosts]], or add it to ~/.ssh/config; to test: ssh {host} true",
    )


def _changed_key(host: str, words: str) -> DlctlError:
    return NotPermitted(
        f"the host key of {host} has changed: it was reinstalled, or another machine answers",
        where=host,
        hint=f"if you know that it was reinstalled: ssh-keygen -R {host}, then: ssh {host} true",
    )


def _unknown_key(host: str, words: str) -> DlctlError:
    return NotPermitted(
        f"the host key of {host} is not known on this machine",
        where=host,
        hint=f"compare its fingerprint and confirm it once: ssh {host} true",
    )


def _login_refused(host: str, words: str) -> DlctlError:
    return NotPermitted(
        f"{host} refuses the login{_last(words)}",
        where=host,
        hint=f"ssh has to log in without a prompt: ssh-add -l, ssh-copy-id {host}; to test: "
        f"ssh -o BatchMode=yes {host} true",
    )


def _unreachable(host: str, words: str) -> DlctlError:
    return Unreachable(f"{host} cannot be reached{_last(words)}", where=host, hint=_try(host))


_BY_WORDS: list[tuple[tuple[str, ...], Callable[[str, str], DlctlError]]] = [
    (("could not resolve hostname",), _unknown_name),
    (("host identification has changed",), _changed_key),
    (("host key verification failed",), _unknown_key),
    (("permission denied", "too many authentication failures"), _login_refused),
    (
        (
            "connection refused", "timed out", "no route to host", "is unreachable",
            "connection reset", "connection closed", "closed by remote host", "not responding",
            "broken pipe", "host is down",
        ),
        _unreachable,
    ),
]  # fmt: skip
"""OpenSSH's messages are English in every locale. The first match wins: specific causes first."""


def _ssh_error(answer: Answer) -> DlctlError:
    words = answer.words.lower()
    for signs, meant in _BY_WORDS:
        if any(sign in words for sign in signs):
            return meant(answer.host, answer.words)
    text = f"ssh has failed{_last(answer.words)}"
    return DlctlError(text, where=answer.host, hint=_try(answer.host))


# ---------------------------------------------------------------- from the remote shell and Python


def _shell_error(answer: Answer) -> DlctlError:
    host, words = answer.host, answer.words
    there = f"ssh {host} 'which -a python3; ls -d */bin/python'"
    python = f"set python of this host in [[hosts]]; to list candidates: {there}"
    if answer.status in (NOT_EXECUTABLE, NOT_FOUND):
        text = f"{host} does not have this Python{_last(words)}"
        return DlctlError(text, where=host, hint=python)
    if "unknown option: -p" in words.lower():
        text = f"{host} has a Python that is too old: dlctl needs 3.11"
        return DlctlError(text, where=host, hint=python)
    if "No module named" in words:
        return DlctlError(
            f"{host} has no dlctl, or lacks a dependency{_last(words)}",
            where=host,
            hint=f"install dlctl {_version()} for that Python, or set python in [[hosts]]",
        )
    return DlctlError(
        f"{host} has sent no answer of dlctl (exit {answer.status}){_last(words)}",
        where=host,
        hint=f"see what a login prints there: ssh {host} true",
    )


def _version() -> str:
    from dlctl import __version__

    return __version__


def _try(host: str) -> str:
    return f"ssh {host} true"


def _last(words: str) -> str:
    """The last line of the output, in parentheses, to append to a message."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f" ({escape(lines[-1][:SHOWN_CHARS_MAX])})" if lines else ""
