"""`examine`: facts about this machine; `dlctl/health` interprets them.

It writes nothing. A separate process imports torch, and only if workers will run here.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from daemons.node.firewalls import firewall
from daemons.node.requests import Request, check, field, full_path, root
from dlctl import __version__, kernels
from dlctl.errors import DlctlError
from dlctl.launch.commands import LATE, wait
from dlctl.runs import paths
from dlctl.util import cores
from dlctl.wire import codec

SHARED_MEMORY = Path("/dev/shm")
TORCH_S = 90.0
"""Time for `import torch`, which may come over a network the first time."""
SMI_S = 10.0
WORDS_CHARS_MAX = 400
TORCH = """
import json, os, sys, torch
files = {getattr(module, "__cached__", None) for module in [*sys.modules.values()]}
slow = sum(not os.path.exists(file) for file in files if type(file) is str)
cuda = torch.cuda.is_available()
count = torch.cuda.device_count() * cuda
place = os.path.dirname(torch.__file__)
print(json.dumps([torch.__version__, torch.version.cuda or "", count, slow, place]))
"""
SMI = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
LOGIND = Path("/etc/systemd/logind.conf")
LINGER = Path("/var/lib/systemd/linger")
BOOTED = Path("/run/systemd/system")
"""A file that exists only if systemd runs."""
USER_UID_MIN = 1000
"""The least id of a user that systemd does not exempt."""
YES = ("yes", "true", "1", "on")


def examine(request: Request) -> dict[str, Any]:
    """{user, python, versions, directory, states, runtime, shm, open_files_max, memory,
    cores, gpu, torch, addresses, firewall, logout}; see the functions below.

    `dir`: as in the job file, or `folder`: the parent of runs on the coordinator's machine;
    `state_dir`: as in the job file; `needs_torch`: whether workers run here. Raises UsageError.
    """
    needs_torch, folders = field(request, "needs_torch", bool), _folders(request)
    with ThreadPoolExecutor(1) as thread:  # The import takes seconds.
        torch = thread.submit(_torch) if needs_torch else None
        facts = {
            "user": _user(),
            "python": sys.executable,
            "versions": _versions(),
            "no_kernels": kernels.missing(),
            **folders,
            "shm": _directory(SHARED_MEMORY),
            "open_files_max": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "memory": _memory(),
            "cores": cores.usable(),
            "gpu": _gpu(),
            "addresses": _addresses(),
            "firewall": firewall(),
            "logout": _logout(),
        }
        return {**facts, "torch": torch.result() if torch is not None else {}}


def _user() -> str:
    """The user's name, or the number if there is no name."""
    return str(psutil.Process().username())


def _versions() -> dict[str, Any]:
    """Installed versions; does not import torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {
        "dlctl": __version__,
        "protocol": codec.PROTOCOL,
        "python": platform.python_version(),
        "torch": torch,
    }


# ---------------------------------------------------------------- files


def _folders(request: Request) -> dict[str, Any]:
    """directory, states (None: in shared memory) and runtime, each as `_directory` returns it."""
    folder, state_dir = field(request, "folder", str), field(request, "state_dir", str)
    own = root(request)
    return {
        "directory": _directory(
            full_path(request, "folder") if folder else own, is_private=not folder
        ),
        "states": _directory(full_path(request, "state_dir")) if state_dir else None,
        "runtime": _directory(paths.runtime_dir(), is_private=True),
    }


def _directory(place: Path, *, is_private: bool = False) -> dict[str, Any]:
    """{path, problem, fix, free_bytes}: whether dlctl could store its files there. is_private: no
    other user may be able to enter it.
    """
    problem, fix, free_bytes = "", "", 0
    try:
        nearest = next(path for path in (place, *place.parents) if path.exists())
        free_bytes = shutil.disk_usage(nearest).free
        if is_private and nearest == place:
            check(place)
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            problem = f"{nearest} is on a file system that is read-only"
        elif not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            problem = f"{nearest} cannot be written to by {_user()}"
    except DlctlError as error:
        problem, fix = error.message, error.hint or ""
    except OSError as error:
        problem, free_bytes = f"{error.strerror}: {error.filename}", 0
    return {"path": str(place), "problem": problem, "fix": fix, "free_bytes": free_bytes}


# ---------------------------------------------------------------- hardware, kernel


def _memory() -> dict[str, int]:
    """Bytes of the machine, or the cgroup limit of this process if that is less."""
    memory = psutil.virtual_memory()
    found = {"total_bytes": int(memory.total), "available_bytes": int(memory.available)}
    limit = cores.text_of(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdecimal():
        found = {key: min(value, int(limit)) for key, value in found.items()}
    return found


def _gpu() -> dict[str, Any]:
    """{devices: ["name, driver"], problem}, from nvidia-smi."""
    try:
        output = wait(SMI, SMI_S)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # Also for entries of PATH.
        return {"devices": [], "problem": ""}
    except OSError as error:
        return {"devices": [], "problem": str(error)}
    if output.status == LATE:
        return {"devices": [], "problem": f"no answer in {SMI_S:.0f} s"}
    if output.status:
        words = output.last_line()[:WORDS_CHARS_MAX]
        return {"devices": [], "problem": words or f"exit {output.status}"}
    return {"devices": list(filter(None, map(str.strip, output.out.splitlines()))), "problem": ""}


def _addresses() -> dict[str, list[str]]:
    """Interface -> its addresses, without link-local ones."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [str(a.address) for a in found if a.family in families and "%" not in a.address]
        for name, found in psutil.net_if_addrs().items()
    }


def _logout() -> dict[str, bool]:
    """{kills, removes_ipc}: what systemd does when the last session of this user ends."""
    if os.getuid() < USER_UID_MIN or not BOOTED.exists() or (LINGER / _user()).exists():
        return {"kills": False, "removes_ipc": False}
    files = [LOGIND, *sorted(LOGIND.with_suffix(".conf.d").glob("*.conf"))]
    output = {"KillUserProcesses": "no", "RemoveIPC": "yes"}
    for path in files:
        pairs = [line.partition("=") for line in cores.text_of(path).splitlines()]
        output |= {key.strip(): value.strip().lower() for key, _, value in pairs}
    return {"kills": output["KillUserProcesses"] in YES, "removes_ipc": output["RemoveIPC"] in YES}


# ---------------------------------------------------------------- torch


def _torch() -> dict[str, Any]:
    """{version, cuda, devices, uncompiled, place}, or {problem}. uncompiled: modules without a .pyc
    file, although Python writes those that it can; place: the directory of torch.
    """
    output = wait([sys.executable, "-P", "-c", TORCH], TORCH_S)
    if output.status == LATE:
        return {"problem": f'"import torch" has not finished in {TORCH_S:.0f} s'}
    try:
        found = json.loads(output.out.splitlines()[-1])
        version, cuda, devices, uncompiled, place = found
    except (ValueError, IndexError):
        return {"problem": output.last_line()[:WORDS_CHARS_MAX] or "no output"}
    return {
        "version": version,
        "cuda": cuda,
        "devices": devices,
        "uncompiled": uncompiled,
        "place": place,
    }
