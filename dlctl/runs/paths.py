"""Where a run's files are, and how commands find a run.

    <run_dir>/<job>-<id>/
        job.toml   the job file as it was        job.json  the resolved job
        run.db     state, events, metrics        key       32 random bytes, signs worker tokens
        terms      of slots and shards    lock       held by the live coordinator
        logs/<daemon>.<incarnation>.jsonl        ckpt/<step>/manifest.json, shard-*.safetensors

Every run is linked in a per-user index, so that `ps` and `status` work in any directory. Sockets
live in a runtime directory that only this user can enter: unix socket paths must be short.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlctl.errors import DlctlError
from dlctl.util.fsync import replacing

UNFINISHED = ".dlctl-unfinished"
"""A file in a run directory under construction: while it exists, the directory is not a run."""
_TAKES_NOTHING = (errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT)
SIMULATED = "simulated"
"""A file in the directory of a simulated run. No command takes such a run unless it is named."""
LOCK = "lock"
"""A file in the run directory: the coordinator locks it, and touches it every second."""
BEAT_LATE_S = 3.0
"""A lock not touched for this long is late."""
STILL_LIMITS = 2
"""An agent kills a coordinator that has not touched its lock for this many times `silent_s`."""
SOCKET_PATH_MAX = 107
PRIVATE = 0o700
"""Mode of a run directory. Files in it are as the umask says, but for the key: so a user opens a
run for reading by a chmod of its directory, which no command takes back.
"""


def index_dir() -> Path:
    """One symbolic link per run: `$XDG_STATE_HOME/dlctl/runs` (~/.local/state/dlctl/runs)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "dlctl" / "runs"


def all_runs() -> Iterator[Path]:
    """Directories of all known runs that still exist, oldest first."""
    links = sorted(index_dir().glob("[!.]*"), key=lambda link: link.lstat().st_mtime)
    yield from (link.resolve() for link in links if is_run(link))


def is_run(directory: Path) -> bool:
    """Whether this is a run directory: it has the run's database, or had one and still has a
    checkpoint to resume from.
    """
    if (directory / UNFINISHED).exists():
        return False
    if (directory / "run.db").exists():
        return True
    return (directory / "job.json").exists() and any(directory.glob("ckpt/*/manifest.json"))


def is_simulated(directory: Path) -> bool:
    return (directory / SIMULATED).exists()


def register(directory: Path) -> None:
    """Make this run known to commands in any directory. Atomic if it was known before."""
    index = index_dir()
    index.mkdir(parents=True, exist_ok=True)
    link = index / f".{directory.name}"
    link.unlink(missing_ok=True)
    link.symlink_to(directory.resolve())
    link.replace(index / directory.name)


def runtime_dir() -> Path:
    """The parent of this user's socket directories: `$XDG_RUNTIME_DIR/dlctl`, or in /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "dlctl" if runtime else Path(f"/tmp/dlctl-{os.getuid()}")


def socket_dir(run_id: str) -> Path:
    """The directory of a run's unix sockets; created with mode 0700.

    Raises DlctlError if it belongs to another user or is a link.
    """
    base = runtime_dir()
    for directory in (base, base / run_id):
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if not is_private(directory):
            raise DlctlError(
                "the socket directory must be a directory that you own, with mode 0700",
                where=str(directory),
                hint=f"remove {directory} or set XDG_RUNTIME_DIR to a directory that you own",
            )
    return base / run_id


def is_private(path: Path) -> bool:
    """Whether this is a directory of this user, not a link, that no other user can enter. Raises
    OSError if it does not exist or cannot be inspected.
    """
    info = path.lstat()
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077


def open_to_all(directory: Path) -> str:
    """The mode of a directory that users outside of its group can enter, such as a run of an older
    version: "0755". "" if they cannot, or if it cannot be inspected.
    """
    with suppress(OSError):
        mode = stat.S_IMODE(directory.stat().st_mode)
        return f"{mode:04o}" if mode & 0o007 else ""
    return ""


def write(path: Path, data: bytes, mode: int) -> None:
    """Replace `path` by a new file, atomically. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(data)


def socket_address(run_id: str, name: str) -> str:
    """`ipc://` address of one daemon's socket. Raises DlctlError if the path is too long."""
    path = str(socket_dir(run_id) / name)
    if len(path.encode()) > SOCKET_PATH_MAX:
        raise DlctlError(
            f"a socket path has {len(path)} bytes; the kernel allows {SOCKET_PATH_MAX}",
            where=path,
            hint="set XDG_RUNTIME_DIR to a shorter directory",
        )
    return f"ipc://{path}"


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Exclusive access to create or recover this run directory.

    Raises BlockingIOError if another process holds it, and FileNotFoundError if it does not exist
    or was replaced before the lock was acquired.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        yield
    finally:
        os.close(descriptor)


def beat_age_s(directory: Path, now: float) -> float | None:
    """How long ago a coordinator touched its lock; None if the run never had one.

    A touch needs no disk space, so a coordinator that cannot write any more is still seen to run.
    If the file system refuses even that, it is 0: nothing can be observed, and the coordinator is
    not to blame. (The same holds for a reader whose own mount is read-only.)
    """
    try:
        age_s = now - (directory / LOCK).stat().st_mtime
    except OSError:
        return None
    return 0.0 if age_s > BEAT_LATE_S and refusal(directory) else age_s


def refusal(directory: Path) -> str:
    """Why the file system of a run directory refuses even to set the time of a file: "Read-only
    file system", as after an I/O error. "" if it does not, or if we are not the file's owner.

    The mount flags are not enough: ext4 has a state in which it is read-only but reports that only
    on writes.
    """
    lock = directory / LOCK
    try:
        found = lock.stat()
        os.utime(lock, ns=(found.st_atime_ns, found.st_mtime_ns))
    except OSError as error:
        return os.strerror(error.errno or 0) if error.errno in _TAKES_NOTHING else ""
    return ""


def log_path(directory: Path, name: str, incarnation: int) -> Path:
    """The log of one incarnation of a daemon; rotated parts have suffixes .1, .2 ..., higher ones
    are older.
    """
    return directory / "logs" / f"{name}.{incarnation}.jsonl"


def remove_sockets(run_id: str) -> None:
    """Remove a run's socket directory; all of its daemons must be gone."""
    shutil.rmtree(socket_dir(run_id), ignore_errors=True)
