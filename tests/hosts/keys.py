"""What ssh and sshd need to know each other: keys, known hosts, and an `ssh` that uses them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST = """Host {name}
  HostName {address}
  Port 22
  User root
"""
ALL = """Host *
  IdentityFile {directory}/key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {directory}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  KexAlgorithms curve25519-sha256
"""
WRAPPER = """#!/bin/sh
exec {program} -F {directory}/ssh_config "$@"
"""
SSHD = """Port 22
ListenAddress {address}
HostKey /run/host/host_key
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile .ssh/authorized_keys
PrintMotd no
Subsystem sftp internal-sftp
SetEnv {environment}
"""


def make(directory: Path, names: Sequence[str]) -> None:
    """One key pair per name, in files `name` and `name.pub`."""
    made = [
        subprocess.Popen(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", directory / name],
            stdin=subprocess.DEVNULL,
        )
        for name in names
    ]
    for process in made:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)


def public(directory: Path, name: str) -> str:
    """One line, with its end."""
    return (directory / f"{name}.pub").read_text()


def client(directory: Path, addresses: Mapping[str, str]) -> Path:
    """Write known_hosts, ssh_config and a directory with an `ssh` of its own; returns the latter.

    The user's ~/.ssh and this machine's /etc/ssh are neither read nor written.
    """
    known = [f"{name},{at} {public(directory, name)}" for name, at in addresses.items()]
    (directory / "known_hosts").write_text("".join(known))
    config = "".join(HOST.format(name=name, address=at) for name, at in addresses.items())
    (directory / "ssh_config").write_text(config + ALL.format(directory=directory))
    programs = directory / "bin"
    programs.mkdir()
    for name in ("ssh", "scp"):
        program = programs / name
        program.write_text(WRAPPER.format(program=shutil.which(name), directory=directory))
        program.chmod(0o700)
    return programs


def server(address: str, environment: Mapping[str, str]) -> str:
    """The text of sshd_config; everybody who logs in has this environment."""
    words = [shlex.quote(f"{name}={value}") for name, value in environment.items()]
    return SSHD.format(address=address, environment=" ".join(words))
