"""Command lines for the system's ssh. This module starts nothing.

    ssh NAME -- PYTHON -P -m daemons.node

The user's ssh configuration applies: aliases, jump hosts, agents, known hosts. ssh never prompts:
where it would (for a password, or to confirm a host key), the call fails. So an unknown host key is
refused, unless the user's configuration accepts new ones.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from dlctl.config import Host
from dlctl.errors import UsageError
from dlctl.runs import paths
from dlctl.util.hostnames import ssh_fault

CONTROL = "ssh"
"""The directory of shared connections, beside those of the runs: every run id has a dash."""
CONTROL_NAME_CHARS = 40 + 17
"""Of %C, and of the suffix that ssh temporarily appends."""
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


def python_words(host: Host) -> list[str]:
    """The remote command. A login starts in the home directory, so "~/" needs no shell."""
    python = host.python or sys.executable
    if python.startswith("~/"):
        python = f".{python[1:]}"
    return [python, "-P", "-m", "daemons.node"]
