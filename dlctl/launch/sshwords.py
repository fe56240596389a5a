"""What the system's ssh is told: whom to connect to, and what to run there. Nothing is started.

    ssh NAME -- PYTHON -P -m daemons.node

The user's own configuration of ssh holds: aliases, jump hosts, agents, known hosts. Nobody is asked
anything: where ssh would ask (for a password, or whether a host key is right), the call fails. So
an unknown host key is refused, unless the user's configuration accepts new ones.
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
"""The directory of shared connections, beside those of the runs: no run id has no dash."""
CONTROL_NAME_CHARS = 40 + 17
"""Of %C, and of what ssh appends to it for a moment."""
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
    """Where ssh keeps connections for further calls; "" if the path would be too long for it.

    Raises DlctlError if somebody else may go in there.
    """
    directory = str(paths.socket_dir(CONTROL))
    size_bytes = len(os.fsencode(directory)) + 1 + CONTROL_NAME_CHARS
    return f"{directory}/%C" if size_bytes <= paths.SOCKET_PATH_MAX else ""


def argv(host: Host, words: Sequence[str], control_path: str) -> list[str]:
    """The command that runs `words` on a host, exactly as they are: ssh would join its arguments
    with spaces, and the shell there would read them again.

    control_path: "": a connection of its own. Raises UsageError if the host is none.
    """
    shared = {"ControlMaster": "no", "ControlPath": "none"}
    if control_path:
        shared = {"ControlMaster": "auto", "ControlPath": control_path, "ControlPersist": "60"}
    options = [f"-o{key}={value}" for key, value in {**OPTIONS, **shared}.items()]
    return ["ssh", "-T", *options, "--", _checked(host), shlex.join(words)]


def address_argv(host: Host) -> list[str]:
    """The command that says how ssh would reach a host. Raises UsageError if the host is none."""
    return ["ssh", "-G", "--", _checked(host)]


def _checked(host: Host) -> str:
    if fault := ssh_fault(host.ssh):
        raise UsageError(f'the host "{host.ssh}" {fault}', hint="correct ssh in [[hosts]]")
    return host.ssh


def python_words(host: Host) -> list[str]:
    """What is run there. A login begins in the home directory, so that "~/" needs no shell."""
    python = host.python or sys.executable
    if python.startswith("~/"):
        python = f".{python[1:]}"
    return [python, "-P", "-m", "daemons.node"]
