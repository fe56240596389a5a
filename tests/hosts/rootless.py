"""Whoever is not root becomes the root of a user namespace, with networks of its own.

Clusters are the same there, and so are their links: the kernel of this machine shapes them. Such a
root can be its user and the user's range of /etc/subuid, nobody else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from .cluster import SBIN

ENTER = (
    "unshare", "--user", "--map-root-user", "--map-auto", "--net", "--mount", "--",
    "sh", "-c", 'ip link set lo up && exec "$@"', "sh",
)  # fmt: skip
"""Put before a command line, replaces itself by it: signals and the exit code are the command's."""


def become_root(module: str, arguments: Sequence[str]) -> None:
    """Begin `python -m module` anew in such a namespace. Returns only to root, and where there can
    be none: then it says why, and what needs networks has to be left out.
    """
    if not os.geteuid():
        return
    env = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:{SBIN}"}
    if why := _why_not(env):
        print(f"neither root nor a user namespace: {why}", file=sys.stderr, flush=True)
        return
    command = [*ENTER, sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, env)


def _why_not(env: Mapping[str, str]) -> str:
    try:
        tried = subprocess.run([*ENTER, "true"], capture_output=True, text=True, env=env)
    except FileNotFoundError:
        return "unshare is not here (util-linux)"
    if not tried.returncode:
        return ""
    said = tried.stderr.strip() or f"unshare ended with {tried.returncode}"
    return f"{said} (it needs newuidmap of uidmap, a range in /etc/subuid, and ip of iproute2)"
