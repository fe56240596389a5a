"""Where the servers of a run store their shards, and reading them when the servers are gone.

    /dev/shm/dlctl-<uid>/<run id>/shard-<k>.state     durability = "process", if there is room
    <run directory>/state/shard-<k>.state             otherwise
    <run directory>/state/shard-<k>.base-<number>     durability = "disk": a snapshot,
    <run directory>/state/shard-<k>.journal-<number>  and every commit since
    <run directory>/state/shard-<k>.lock

Tables beside the parameters have separate files, `shard-<k>-<table>.state` and so on.
`servers.state_dir` replaces the first directory and `<run directory>/state`, with the run id
appended. Servers write these files (`daemons/server/`) and remove them when their run is over; this
module reads them, and removes what a server could not remove any more.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dlctl.errors import DlctlError
from dlctl.job.config import Servers
from dlctl.shards import image, journal_format
from dlctl.shards.base import check_state
from dlctl.shards.errors import Unusable
from dlctl.util import regular
from dlctl.util.flock import is_locked
from dlctl.util.processes import boot_id as boot_id
from dlctl.wire.messages import Json

_Identity = tuple[str, int, str]
"""Run, shard and table."""
_NAME = re.compile(r"shard-(\d+)(?:-([a-z0-9_]+))?\.(state|base-\d+)")
NO_VALUES, EMPTY = "it has no values yet", "it is empty"


@dataclass(frozen=True, slots=True)
class KeptShard:
    """The stored state of one server, live or not: its shards of all tables together."""

    shard: int
    path: Path
    """The stored state of the parameters' shard."""
    in_use: bool
    """A live server has it open; the facts are a moment old."""
    problem: str
    """Why a server cannot resume from it; "" if one can."""
    initialised: bool = False
    version: int = 0
    """The version of the parameters: how many updates they have."""
    deliveries: list[list[int]] = field(default_factory=list)
    """[[slot, term, next number, ...], ...]: which pushes of each worker the parameters have."""


class _Found(NamedTuple):
    """The stored state of one table's shard."""

    path: Path
    in_use: bool
    problem: str
    """Why the state cannot be read; "" if it was."""
    state: Json
    """The role's state in the last commit; {} if there was none or it cannot be read."""


def shared_memory() -> Path:
    """The directory of this user in shared memory."""
    return Path(f"/dev/shm/dlctl-{os.getuid()}")


def places(run_directory: Path, servers: Servers) -> list[Path]:
    """The directories that may have this run's states, the preferred one first."""
    if servers.state_dir:
        return [Path(servers.state_dir) / run_directory.name]
    if servers.durability == "disk":
        return [run_directory / "state"]
    ours = [shared_memory() / run_directory.name] if _may_be_ours(shared_memory()) else []
    return [*ours, run_directory / "state"]


def _may_be_ours(directory: Path) -> bool:
    """Whether a directory is absent or ours: in shared memory any user may create this name."""
    try:
        info = directory.lstat()
    except OSError:
        return True
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()


def kept(run_directory: Path, servers: Servers) -> list[KeptShard]:
    """All stored states of a run's servers, by shard, checked where there are checksums.

    Damage is detected everywhere except in the vectors of a killed server, which have no checksum:
    see `shards/image.py`. Changes nothing, and keeps no lock.
    """
    found: dict[int, dict[str, _Found]] = {}
    for directory in places(run_directory, servers):
        # Of several bases, the last one by name is the newest.
        for path in sorted(directory.glob("shard-*"), reverse=True):
            if match := _NAME.fullmatch(path.name):
                shard, table = int(match[1]), match[2] or ""
                tables = found.setdefault(shard, {})
                # An empty file hides no other one, neither here nor from a server.
                if table not in tables or tables[table].problem == EMPTY:
                    tables[table] = _look((run_directory.name, shard, table), path)
    # Other tables alone are left by a server that was killed while removing its files.
    return [_kept(shard, found[shard]) for shard in sorted(found) if "" in found[shard]]


def remove(run_directory: Path, servers: Servers) -> list[Path]:
    """Remove the files of servers that died before the end of their run; returns what was removed.

    Files that a live server has open stay, and so do files that cannot be removed.
    """
    removed = []
    for directory in places(run_directory, servers):
        for path in sorted(directory.glob("shard-*")):
            with suppress(OSError):
                if not _is_held(path):
                    path.unlink()
                    removed.append(path)
        with suppress(OSError):
            directory.rmdir()
    return removed


def _look(identity: _Identity, path: Path) -> _Found:
    in_use = False
    try:
        in_use = _is_held(path)
        is_image = path.suffix == ".state"
        state = _read_image(path, identity, in_use) if is_image else _read_log(path, identity)
        return _Found(path, in_use, "", state)
    except DlctlError as error:
        return _Found(path, in_use, error.message, {})
    except FileNotFoundError:  # Its server has just removed it.
        return _Found(path, in_use, EMPTY, {})
    except OSError as error:
        return _Found(path, in_use, str(error.strerror), {})


def _read_image(path: Path, identity: _Identity, in_use: bool) -> Json:
    """Read the state in a mapped file. Raises Unusable or OSError. in_use: a server may write to it
    during the read.
    """
    descriptor = regular.descriptor(path, os.O_NOFOLLOW)
    try:
        if not os.fstat(descriptor).st_size:
            raise Unusable(EMPTY)
        buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    form = image.read_header(buffer)
    _check_is((form.run_id, form.shard, form.table), identity)
    if form.boot_id != boot_id():
        raise Unusable("it is of before a reboot: not all of it may have come to the disk")
    if in_use:
        return check_state(image.commit_of_living(buffer, form).body["state"])
    newest = image.newest_commit(buffer, form)
    if not list(form.undo(buffer).pending(newest.number + 1, form.size)):
        image.check_seal(buffer, form, newest)
        image.check_finite(form.vectors(buffer, newest.current))
    return check_state(newest.body["state"])


def _read_log(path: Path, identity: _Identity) -> Json:
    """The state of a base and its journal. Raises Unusable or OSError."""
    journal = path.with_name(path.name.replace(".base-", ".journal-"))
    base = journal_format.read(regular.read_bytes(path))
    if base is None:
        raise Unusable("it is damaged")
    body = base[0].body
    _check_is((body.get("run_id"), body.get("shard"), body.get("table", "")), identity)
    state = body.get("state")
    for record in journal_format.read_each(regular.pieces(journal) if journal.exists() else ()):
        state = check_state(record.body.get("state"))
    if not path.exists():  # Its journal may be gone too: the newest state is elsewhere.
        raise Unusable("a server is writing it")
    return check_state(state)


def _check_is(found: tuple[Any, Any, Any], wanted: _Identity) -> None:
    """Raises Unusable if the state has another identity."""
    if found != wanted:
        run_id, shard, table = found
        of = f'table "{table}" of ' if table else ""
        raise Unusable(f"it is of {of}shard {shard} of run {run_id}")


def _kept(shard: int, tables: dict[str, _Found]) -> KeptShard:
    parameters = tables[""]
    meta = parameters.state.get("meta", {})
    initialised = bool(meta.get("initialised"))
    problem = parameters.problem or _problem_of_others(meta, tables)
    return KeptShard(
        shard,
        parameters.path,
        any(found.in_use for found in tables.values()),
        problem or ("" if initialised else NO_VALUES),
        initialised,
        parameters.state.get("version", 0),
        meta.get("deliveries", []),
    )


def _problem_of_others(meta: Json, tables: dict[str, _Found]) -> str:
    """Why a server could not resume with the tables beside the parameters; "" if it could."""
    for name in sorted({*meta.get("tables", []), *tables} - {""}):
        if name not in tables:
            return f'its table "{name}" is missing'
        if tables[name].problem:
            return f'its table "{name}" cannot be used: {tables[name].problem}'
    return ""


def _is_held(path: Path) -> bool:
    """Whether a server has this file open: it locks its state itself, or a file beside its log."""
    shard = path.name.partition(".")[0]
    lock = path if path.suffix == ".state" else path.with_name(f"{shard}.lock")
    try:
        return is_locked(lock)
    except FileNotFoundError:
        return False
