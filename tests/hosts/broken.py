"""Hosts that are set up wrongly. Each function breaks one thing on one host, and nowhere else.

What a running process has opened or imported already stays as it was.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

import dlctl

from .holders import HostHolder

OWN = "run/host"
FIREWALL = """table inet firewall
flush table inet firewall
table inet firewall {{
  chain in {{
    type filter hook input priority 0;
    iif lo accept
    {rule}
  }}
}}
"""
NEW = "tcp dport {{ {ports} }} tcp flags & (syn | ack) == syn drop"
CLOCK_SOURCE = Path(__file__).parents[1] / "faults" / "false_clock.c"
CLOCK = "/run/host/clock"


def authorize(host: HostHolder, keys: str) -> None:
    """Let only these keys in; one per line."""
    (host.files / "root/.ssh/authorized_keys").write_text(keys)


def firewall(host: HostHolder, ports: Iterable[int | str]) -> None:
    """Say nothing to who wants to connect to these ports; "1024-65535" is a range; []: all may.

    Connections that are there go on, and the host itself may connect to anybody.
    """
    named = ", ".join(str(port) for port in ports)
    rule = NEW.format(ports=named) if named else ""
    host.do("nft", "-f", "-", stdin=FIREWALL.format(rule=rule))


def small_shm(host: HostHolder, size_bytes: int) -> None:
    """/dev/shm holds no more than that; whole pages."""
    host.mount("-o", f"remount,size={size_bytes}", "/dev/shm")


def read_only_home(host: HostHolder) -> None:
    host.mount("-o", "remount,ro", "/root")


def hide_torch(host: HostHolder) -> None:
    """torch is not installed there. Raises ModuleNotFoundError if it is not installed here."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("there is no torch that could be hidden", name="torch")
    packages = Path(found.origin).parents[1]
    without = "without-torch"
    hidden = host.files / OWN / without
    hidden.mkdir()
    for path in [packages / "torch", *packages.glob("torch-*.dist-info")]:
        # In an overlay, a device 0:0 says that there is nothing.
        os.mknod(hidden / path.name, stat.S_IFCHR, os.makedev(0, 0))
    layers = f"lowerdir=/{OWN}/{without}:{packages}"
    host.mount("-t", "overlay", "overlay", "-o", layers, str(packages))


def other_version(host: HostHolder, version: str) -> None:
    """dlctl is there, and says that it is this version."""
    original = Path(dlctl.__file__)
    line = re.compile(r'^__version__ = ".*"$', re.MULTILINE)
    text, count = line.subn(f'__version__ = "{version}"', original.read_text())
    assert count == 1
    (host.files / OWN / "dlctl.py").write_text(text)
    host.mount("--bind", f"/{OWN}/dlctl.py", str(original))


def fake_clock(host: HostHolder, library: Path, offset_s: int) -> None:
    """Programs that start there from now on believe that it is `offset_s` later than it is.

    Those that were started after the first call see every later one at once. Monotonic clocks and
    the times of files stay true.
    """
    own = host.files / OWN
    if not (own / "clock").exists():
        shutil.copy(library, own / library.name)
        (own / "clock").write_bytes(struct.pack("=q", 0))
        (host.files / "etc/ld.so.preload").write_text(f"/{OWN}/{library.name}\n")
    # In place, as processes have it mapped.
    with (own / "clock").open("r+b") as file:
        file.write(struct.pack("=q", offset_s))


def build_clock(directory: Path) -> Path:
    """The library that lies about the time. Raises FileNotFoundError without a C compiler."""
    library = directory / "false_clock.so"
    if not library.exists():
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(CLOCK_SOURCE)]
        subprocess.run(command, check=True)
    return library
