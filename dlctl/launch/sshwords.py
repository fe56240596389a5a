"""Command lines for the system's ssh, and what its words mean. This module starts nothing.

    ssh NAME -- PYTHON -P -m daemons.node

The user's ssh configuration applies: aliases, jump hosts, agents, known hosts. ssh never prompts:
where it would (for a password, or to confirm a host key), the call fails. So an unknown host key is
refused, unless the user's configuration accepts new ones.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence

from dlctl.errors import DlctlError, NotPermitted, Unreachable, UsageError
from dlctl.job.config import Host
from dlctl.launch import answers
from dlctl.launch.answers import NO_COMMAND, CallResult, last
from dlctl.runs import paths
from dlctl.util.hostnames import ssh_fault

SSH_FAILED = 255
CONTROL = "ssh"
"""The directory of shared connections, beside those of the runs: every run id has a dash."""
CONTROL_NAME_CHARS = 40 + 17
"""The length of ssh's %C, and of the suffix that ssh temporarily appends to it."""
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "5",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
}


def control_path() -> str:
    """The socket path of shared ssh connections; "" if it would be too long.

    Raises DlctlError if another user may enter the directory.
    """
    directory = str(paths.socket_dir(CONTROL))
    size_bytes = len(os.fsencode(directory)) + 1 + CONTROL_NAME_CHARS
    return f"{directory}/%C" if size_bytes <= paths.SOCKET_PATH_MAX else ""


def argv(host: Host, words: Sequence[str], control_path: str) -> list[str]:
    """The command that runs `words` on a host, quoted: ssh joins its arguments with spaces, and the
    remote shell splits them again.

    control_path: "": a separate connection. Raises UsageError if the host is invalid.
    """
    shared = {"ControlMaster": "no", "ControlPath": "none"}
    if control_path:
        shared = {"ControlMaster": "auto", "ControlPath": control_path, "ControlPersist": "60"}
    options = [f"-o{key}={value}" for key, value in {**OPTIONS, **shared}.items()]
    return ["ssh", "-T", *options, "--", _checked(host), shlex.join(words)]


def address_argv(host: Host) -> list[str]:
    """The command that prints how ssh would reach a host. Raises UsageError for an invalid host."""
    return ["ssh", "-G", "--", _checked(host)]


def _checked(host: Host) -> str:
    if fault := ssh_fault(host.ssh):
        raise UsageError(f'the host "{host.ssh}" {fault}', hint="correct ssh in [[hosts]]")
    return host.ssh


# ---------------------------------------------------------------- its words


def trial(host: str) -> str:
    """The command with which a person tries the login."""
    return f"ssh {host} true"


def explain(answer: CallResult) -> DlctlError:
    """What failed, where, why (if known), and what to do next."""
    host = answer.host
    if answer.value is None and answer.status == NO_COMMAND:
        return DlctlError(
            f"this machine has no ssh command, so {host} cannot be reached",
            where="this machine",
            hint="install OpenSSH's client, as with: apt install openssh-client",
        )
    if answer.value is not None or answer.status != SSH_FAILED:
        return answers.explain(answer, trial(host))
    words = answer.words.lower()
    for signs, meant in _BY_WORDS:
        if any(sign in words for sign in signs):
            return meant(host, answer.words)
    return DlctlError(f"ssh has failed{last(answer.words)}", where=host, hint=trial(host))


def _unknown_name(host: str, words: str) -> DlctlError:
    return Unreachable(
        f"the name {host} cannot be resolved{last(words)}",
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
        f"{host} refuses the login{last(words)}",
        where=host,
        hint=f"ssh has to log in without a prompt: ssh-add -l, ssh-copy-id {host}; to test: "
        f"ssh -o BatchMode=yes {host} true",
    )


def _unreachable(host: str, words: str) -> DlctlError:
    return Unreachable(f"{host} cannot be reached{last(words)}", where=host, hint=trial(host))


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
