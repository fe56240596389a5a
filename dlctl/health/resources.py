"""Findings about files, memory, limits and the clock of one machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from dlctl.health.findings import FAULT, OK, WARNING, Facts, Finding, duration_text
from dlctl.health.needs import HostNeed
from dlctl.util import hints
from dlctl.util.text import plural
from dlctl.util.units import short_size

DISK_BYTES_MIN = 50 << 20
DISK_BYTES_GOOD = 512 << 20
OPEN_FILES_MIN = 128
OPEN_FILES_PER_DAEMON = 8
WORKER_BYTES = 400 << 20
"""Memory of a process that has imported torch, without a model."""
LOADER_BYTES = 32 << 20
"""Shared memory that a process of a DataLoader may fill with its batches."""
RUNS_LISTED_MAX = 8
CLOCK_WARNING_S, CLOCK_FAULT_S = 2.0, 60.0


def findings(need: HostNeed, facts: Facts) -> Iterator[Finding]:
    yield _folder(need, "files", facts["directory"])
    if facts["states"] is not None:
        yield _folder(need, "state_dir", facts["states"])
    if facts["runtime"]["problem"]:
        yield _folder(need, "sockets", facts["runtime"])
    if need.shm_bytes:
        yield _shared_memory(need, facts)
    if need.loader_processes and need.workers:
        yield from _loaders(need, facts)
    yield _memory(need, facts)
    yield _cores(need, facts)
    yield _open_files(need, facts)
    yield from _logout(need, facts)


def open_runs(need: HostNeed, modes: Mapping[str, str]) -> Finding:
    """modes: path of a run directory that other users can enter -> its mode."""
    listed = [*modes][:RUNS_LISTED_MAX]
    names = ", ".join(f"{path.rpartition('/')[2]} (mode {modes[path]})" for path in listed)
    text = f"other users can read the files of {plural(len(modes), 'run')}: {names}"
    fix = f"chmod 700 {shlex.join(listed)}"
    if more := len(modes) - len(listed):
        text, fix = (
            f"{text} and {more} more",
            hints.command(fix, "dlctl doctor then lists the others"),
        )
    return Finding(need.name, "runs", WARNING, text, fix, {"open": len(modes)})


def _logout(need: HostNeed, facts: Facts) -> Iterator[Finding]:
    """Effects of systemd-logind at logout; over ssh that happens after every command."""
    fix = f"loginctl enable-linger {facts['user']}"
    if facts["logout"]["kills"]:
        text = (
            "systemd kills your processes when your last session ends (KillUserProcesses): daemons "
            "would not outlive it"
        )
        yield Finding(need.name, "logout", FAULT, text, fix)
    elif facts["logout"]["removes_ipc"] and need.shm_bytes:
        text = (
            "systemd removes your files in /dev/shm when your last session ends (RemoveIPC): a "
            "server restores its shard within 2 s, and a crash before that would lose it"
        )
        yield Finding(need.name, "logout", WARNING, text, fix)


def _folder(need: HostNeed, subject: str, folder: Facts) -> Finding:
    path, free_bytes = folder["path"], folder["free_bytes"]
    room = {"free_bytes": free_bytes}
    elsewhere = "set run_dir in [job]" if need.is_here else "set dir of this host in [[hosts]]"
    if subject == "sockets":
        elsewhere = "set XDG_RUNTIME_DIR to a directory of your own"
    if subject == "state_dir":
        elsewhere = "set state_dir in [servers] to another place"
    if folder["problem"]:
        text = f"no files can be stored in {path}: {folder['problem']}"
        fix = folder["fix"] or f"{elsewhere}, where you can write"
        return Finding(need.name, subject, FAULT, text, fix, room)
    text = f"{path}, {short_size(free_bytes)} free"
    if free_bytes < DISK_BYTES_MIN:
        return Finding(need.name, subject, FAULT, text, f"make room, or {elsewhere}", room)
    if free_bytes < DISK_BYTES_GOOD:
        text = f"{text}: logs and checkpoints may fill it"
        return Finding(need.name, subject, WARNING, text, f"make room, or {elsewhere}", room)
    return Finding(need.name, subject, OK, text, facts=room)


def _shared_memory(need: HostNeed, facts: Facts) -> Finding:
    shm, folder = facts["shm"], facts["directory"]
    numbers = {"free_bytes": shm["free_bytes"], "needed_bytes": need.shm_bytes}
    needed = short_size(need.shm_bytes)
    wish = f"the shards here take about {needed}"
    if not need.is_model_known:
        wish = f"the shards of a small model take up to {needed}, and this one is not known yet"
    text = f"{short_size(shm['free_bytes'])} free; {wish}"
    if not shm["problem"] and shm["free_bytes"] >= need.shm_bytes:
        return Finding(need.name, "/dev/shm", OK, text, facts=numbers)
    remount = f"mount -o remount,size={_larger(need.shm_bytes)}M /dev/shm (as root)"
    if shm["problem"]:
        text = shm["problem"]
    if not need.is_model_known or folder["free_bytes"] >= need.shm_bytes:
        text += f": what does not fit goes into {folder['path']}, which is slower on a disk"
        return Finding(need.name, "/dev/shm", WARNING, text, remount, numbers)
    text += f"; and {folder['path']} has no space for that, either"
    return Finding(need.name, "/dev/shm", FAULT, text, f"{remount}, or make room", numbers)


def _loaders(need: HostNeed, facts: Facts) -> Iterator[Finding]:
    """Too little shared memory ends torch's DataLoader with a bus error; containers have 64 MB."""
    count, free_bytes = need.workers * need.loader_processes, facts["shm"]["free_bytes"]
    wanted = count * LOADER_BYTES + need.shm_bytes
    if free_bytes < wanted:
        text = f"{short_size(free_bytes)} free, for {count} loader processes that pass batches in "
        text += "it; if it is full, a worker dies of a bus error"
        remount = f"mount -o remount,size={_larger(wanted)}M /dev/shm (as root)"
        fix = f"{remount}, or loader_processes = 0 in [workers]"
        yield Finding(need.name, "/dev/shm", WARNING, text, fix)


def _larger(size_bytes: int) -> int:
    """MiB, twice the need, to leave space for other processes."""
    return -(-2 * size_bytes // (1 << 20))


def _memory(need: HostNeed, facts: Facts) -> Finding:
    available, total = (facts["memory"][key] for key in ("available_bytes", "total_bytes"))
    wanted = need.workers * WORKER_BYTES + need.shm_bytes
    text = f"{short_size(available)} of {short_size(total)} free"
    numbers = {"available_bytes": available, "total_bytes": total}
    if available >= wanted:
        return Finding(need.name, "memory", OK, text, facts=numbers)
    text += f"; the workers and shards here take at least {short_size(wanted)}"
    return Finding(need.name, "memory", WARNING, text, _less(need, "memory"), numbers)


def _cores(need: HostNeed, facts: Facts) -> Finding:
    cores, wanted = facts["cores"], need.workers * max(1, need.threads)
    daemons = [plural(need.workers, "worker")] if need.workers else []
    daemons += [plural(len(need.servers), "server")] if need.servers else []
    text = f"{cores}" + (f", for {' and '.join(daemons)}" if daemons else "")
    numbers = {"cores": cores, "workers": need.workers}
    if wanted <= cores:
        return Finding(need.name, "cores", OK, text, facts=numbers)
    text += f"; the workers have {wanted} threads, which compete for the cores"
    return Finding(need.name, "cores", WARNING, text, _less(need, "cores"), numbers)


def _less(need: HostNeed, what: str) -> str:
    if need.is_here:
        return f"fewer workers, or a machine with more {what}"
    return f"fewer workers for this host in [[hosts]], or a machine with more {what}"


def _open_files(need: HostNeed, facts: Facts) -> Finding:
    limit = facts["open_files_max"]
    wanted = OPEN_FILES_MIN + OPEN_FILES_PER_DAEMON * need.daemons
    text = "no limit" if limit < 0 else f"up to {limit:,} at once for each process"
    numbers = {"open_files_max": limit, "wanted": wanted}
    if limit < 0 or limit >= wanted:
        return Finding(need.name, "open files", OK, text, facts=numbers)
    how = "before you start the job" if need.is_here else "in /etc/security/limits.conf there"
    fix = f"ulimit -n {max(4096, wanted)}, {how}" if need.is_here else f"raise nofile {how}"
    mark = FAULT if limit < OPEN_FILES_MIN else WARNING
    text = f"{text}; this job may want {wanted:,}"
    return Finding(need.name, "open files", mark, text, fix, numbers)


def clock(need: HostNeed, offset_s: float, error_s: float) -> Finding:
    """`offset_s`: the host's clock minus this machine's, with an error of `error_s`.

    dlctl uses monotonic clocks and is not affected. A minute is a fault all the same: TLS, make and
    programs that compare file times fail, and logs of several hosts are merged out of order.
    """
    sure_s = abs(offset_s) - error_s
    numbers = {"offset_s": offset_s, "error_s": error_s}
    way = "ahead of" if offset_s > 0 else "behind"
    text = f"{duration_text(abs(offset_s))} {way} this machine, +- {duration_text(error_s)}"
    if sure_s <= CLOCK_WARNING_S:
        return Finding(need.name, "clock", OK, text, facts=numbers)
    why = "its logs and checkpoints have wrong times; dlctl itself does not depend on it"
    fix = "set the clock there: timedatectl set-ntp true"
    if sure_s <= CLOCK_FAULT_S:
        return Finding(need.name, "clock", WARNING, f"{text}: {why}", fix, numbers)
    why = f"{why}, but TLS, make and downloads of your task do"
    return Finding(need.name, "clock", FAULT, f"{text}: {why}", fix, numbers)


def login(need: HostNeed, took_s: float, launcher: str, slow: str) -> Finding:
    """Time until Python on the host has answered, including the login. `launcher`: its title;
    `slow`: what to do about a slow login.
    """
    text = f"logged in; Python answers after {took_s:.2g} s"
    numbers = {"took_s": took_s}
    if took_s < 5:
        return Finding(need.name, launcher, OK, text, facts=numbers)
    return Finding(need.name, launcher, WARNING, text, slow, numbers)
