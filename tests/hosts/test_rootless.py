"""Clusters without root: in a user namespace, or not at all, and then it is said why."""

from __future__ import annotations

import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[2]
BECOME = """
import os, sys
from tests.hosts.rootless import become_root  # as root: this Python may be root's alone
uid = int(sys.argv[1])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
become_root("timeit", ("-n1", "-r1", "-s", "import os, socket", sys.argv[2]))
print("goes on as", os.geteuid())
"""
LOOK = "print(os.geteuid(), socket.if_nameindex())"


def become(uid: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BECOME, str(uid), LOOK]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True)


def somebody_with_a_range() -> int:
    """A user for whom all is there. Raises Skipped where nobody has it."""
    if not shutil.which("newuidmap"):
        pytest.skip("no newuidmap here (uidmap)")
    ranges = Path("/etc/subuid")
    names = [line.split(":")[0] for line in ranges.read_text().split()] if ranges.exists() else []
    for user in pwd.getpwall():
        if user.pw_name in names and user.pw_uid and _can_run(user):
            return user.pw_uid
    pytest.skip("nobody in /etc/subuid can run this Python")


def _can_run(user: pwd.struct_passwd) -> bool:
    command = [sys.executable, "-c", ""]
    try:
        ended = subprocess.run(command, user=user.pw_uid, group=user.pw_gid, extra_groups=[])
        return not ended.returncode
    except PermissionError:
        return False


def test_a_user_is_root_in_a_network_of_its_own() -> None:
    ended = become(somebody_with_a_range())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "0 [(1, 'lo')]"
    assert "goes on" not in ended.stdout


def test_who_cannot_be_root_goes_on_and_it_is_said_why() -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    ended = become(nobody)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"goes on as {nobody}\n"
    assert ended.stderr.startswith("neither root nor a user namespace: unshare")
    assert "uidmap" in ended.stderr
