"""The first process of a host: it furnishes the host, starts its sshd, and buries its dead.

It runs as process 1 of new namespaces and is told one line of JSON (`_plan` in `cluster.py`). When
its standard input is closed it ends, and the kernel ends everything else on the host with it.

Of this machine's files a host sees the operating system and the `visible` directories, read-only,
and the `shared` ones. Everything else (/root, /home, /tmp, /run, /dev/shm ...) is its own and
empty, in memory: no file gets from one host to another, and none stays.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from types import FrameType

from .mounts import BIND, READ_ONLY, REMOUNT, bind, memory, mount

SYSTEM = {
    "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "sbin", "sys", "usr",
    "var",
}  # fmt: skip
MODES = {"/tmp": 0o1777, "/var/tmp": 0o1777, "/dev/shm": 0o1777, "/root": 0o700}
SIZE_BYTES = 1 << 30
OWN = "/run/host"
"""What belongs to the harness on a host."""
LISTENS_AT_22 = (":0016", "0A")
POLL_S = 0.002


def main() -> None:
    print(os.readlink("/proc/self"), flush=True)  # /proc is still that of the machine
    if not (told := sys.stdin.buffer.readline()):
        return
    plan = json.loads(told)
    os.umask(0o022)
    socket.sethostname(plan["name"])
    furnish(plan["visible"], plan["shared"])
    for path, (text, mode) in plan["files"].items():
        write(path, text, mode)
    bind(f"{OWN}/boot_id", "/proc/sys/kernel/random/boot_id", read_only=True)
    join(plan["address"])
    start_sshd(plan["sshd"])
    signal.signal(signal.SIGCHLD, bury)
    print("up", flush=True)
    sys.stdin.buffer.read()


# ---------------------------------------------------------------- files


def furnish(visible: list[str], shared: list[str]) -> None:
    """Hide this machine's files. What is to be seen is held open meanwhile."""
    held = {path: os.open(path, os.O_PATH) for path in sorted({*visible, *shared}, key=len)}
    hidden = [f"/{name}" for name in os.listdir("/") if name not in SYSTEM]
    hidden = [path for path in hidden if os.path.isdir(path) and not os.path.islink(path)]
    for path in [*hidden, "/dev/shm", "/var/tmp"]:
        memory(path, MODES.get(path, 0o755), SIZE_BYTES)
    for path, file in held.items():
        if any(path.startswith(f"{place}/") for place in hidden):
            os.makedirs(path, exist_ok=True)
            bind(f"/proc/self/fd/{file}", path, read_only=path not in shared)
        os.close(file)
    mount("", "/", flags=BIND | REMOUNT | READ_ONLY)
    mount("proc", "/proc", "proc")
    for name in ("etc", "work"):
        os.makedirs(f"{OWN}/{name}")
    mount("etc", "/etc", "overlay", options=f"lowerdir=/etc,upperdir={OWN}/etc,workdir={OWN}/work")


def write(path: str, text: str, mode: int) -> None:
    """A new file; what is in a private one is private to its directory, too."""
    os.makedirs(os.path.dirname(path), mode=0o700 if mode == 0o600 else 0o755, exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


# ---------------------------------------------------------------- network and processes


def join(address: str) -> None:
    lines = ["link set lo up", f"addr add {address} dev eth0", "link set eth0 up", ""]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def start_sshd(program: str) -> None:
    """Returns when it listens."""
    os.makedirs("/run/sshd", mode=0o755)
    os.makedirs("/run/user/0", mode=0o700)
    command = [program, "-D", "-f", f"{OWN}/sshd_config", "-E", f"{OWN}/sshd.log"]
    sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    pause = threading.Event()
    while not is_listening():
        if sshd.poll() is not None:
            with open(f"{OWN}/sshd.log") as log:
                sys.exit(f"sshd ended with {sshd.returncode}: {log.read()}")
        pause.wait(POLL_S)


def is_listening() -> bool:
    """Asked of the kernel: a connection would count as a visitor of sshd."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table]
    return any(row[1].endswith(LISTENS_AT_22[0]) and row[3] == LISTENS_AT_22[1] for row in rows)


def bury(_number: int, _frame: FrameType | None) -> None:
    """Who loses its parent becomes a child of process 1; unburied, it would seem to live on."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
