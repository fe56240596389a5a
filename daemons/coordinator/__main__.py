"""The coordinator: one per run, enforced by a lock on the run directory."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

from daemons import parent_watch, process
from daemons.coordinator import exports
from daemons.coordinator.agents import Agents
from daemons.coordinator.checkpoint_directories import Directories
from daemons.coordinator.mirroring import Mirroring
from daemons.coordinator.past import read_past
from daemons.coordinator.records import Outcome, RunRecords
from daemons.files.file_receiver import FileReceiver
from daemons.files.file_sender import AT_HOME, FileSender
from daemons.files.log_mirror import Mirrored
from daemons.loop import Loop
from daemons.time_records import path_of
from dlctl import registry
from dlctl.control import keys
from dlctl.errors import DlctlError, os_errors_as
from dlctl.launch import addresses, local
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.persistence import corrected
from dlctl.roles.coordinator.records import KeyRenewed, RenewKey
from dlctl.roles.protocol.context import COORDINATOR, EXIT_RESTART
from dlctl.runs import database, paths
from dlctl.runs.database import RunDb
from dlctl.util import regular
from dlctl.util.flock import GLANCE_S, is_locked_within
from dlctl.wire.machine import StopRequested

log = logging.getLogger("dlctl")
CONTROL_FRAME_BYTES_MAX = 64 << 20
"""Limit of one message to the coordinator: the layout of a model is the largest."""


def coordinate(context: process.DaemonContext) -> int:
    """Lead the run to its end. A crash, a requested restart, or an error while an agent is running
    leaves the daemons running: the agent starts the next coordinator, which continues from the
    state that this one has stored.
    """
    directory = context.directory
    lock = _lock(directory)
    db = RunDb(directory)
    is_over = False
    try:
        code = _lead(context, db, lock)
        is_over = code != EXIT_RESTART
    except DlctlError as error:
        # An agent watches the daemons, and will start the next coordinator.
        is_over = not any(daemon.role == "agent" for daemon in local.living(directory))
        if is_over:
            _write_end(db, process.in_words(error))
        raise
    finally:
        if is_over:
            parent_watch.end_all(directory, db)
            parent_watch.remove_leftovers(directory, db.run().get("state"), context.job.servers)
        db.close()
        os.close(lock)
    return code


def _lead(context: process.DaemonContext, db: RunDb, lock: int) -> int:
    directory, job = context.directory, context.job
    keyring = keys.keyring(directory, job.is_encrypted)
    before = db.run() if db.memory() else {}  # The previous coordinator.
    secret = keyring.secret(COORDINATOR)
    loop = Loop(context.log_handler.rotate_if_full, secret=secret)
    loop.chores.append(lambda: _beat(directory, lock, loop))
    loop.stop_on_signals()
    address = before.get("control") or addresses.of_coordinator(directory.name, job).bind
    control = loop.transport.listen(address, CONTROL_FRAME_BYTES_MAX)
    records = RunRecords(directory, db, loop)
    records.exporters = exports.begin(directory, job, loop, db)
    if job.checkpoints.mirror:
        records.exporters.append(Mirroring(directory, loop))
    Directories(directory, loop)
    FileSender(loop, directory, COORDINATOR, AT_HOME)
    FileReceiver(loop, directory)
    Mirrored(loop, directory)
    loop.perform(RenewKey, lambda _: loop.post(_renew_key(directory)))
    key, incarnation = keyring.public(COORDINATOR), context.registration.incarnation
    agents = Agents(context, loop, control, key)
    started_at = before.get("started_at") or time.time()
    recovery = db.run().get("recovery")
    corrections = corrected(db.memory(), recovery) if recovery is not None else {}
    on_record = records.begin(
        corrections,
        control=control, control_key=key, started_at=started_at, incarnation=incarnation,
    )  # fmt: skip
    if not on_record and (recovery is not None or not before):
        # No daemon runs yet, or `dlctl recover` can be repeated, so no work is lost; without the
        # record no command finds this one.
        raise DlctlError(
            f"cannot write the run's database: {records.trouble}", where=str(directory),
            hint="free some space there, then start it again",
        )  # fmt: skip
    past = read_past(directory, db, agents.adopt(db))
    algorithm = registry.load("algorithms", job.algorithm.name)
    coordinator = Coordinator(directory.name, job, keyring, algorithm, past)
    loop.record_times(path_of(directory, context.registration))
    code = loop.run(coordinator)
    records.finish(None if code == EXIT_RESTART else cast(Outcome, coordinator.run.state))
    if code != EXIT_RESTART:
        agents.close()
    return code


def _beat(directory: Path, lock: int, loop: Loop) -> None:
    """Touch the lock, as a heartbeat for agents (`Supervision`). This may fail on a read-only or
    full file system. Stop if the run directory was removed: no command could find or end the run.
    """
    with suppress(OSError):
        if database.is_removed(directory, lock):
            loop.post(StopRequested("its run directory was removed", at_once=True))
        os.utime(lock)


def _renew_key(directory: Path) -> KeyRenewed:
    try:
        keys.renew(directory)
    except OSError as error:
        log.error("cannot write the new key: %s", error)
        return KeyRenewed(str(error.strerror or error))
    return KeyRenewed("")


def _write_end(db: RunDb, reason: str) -> None:
    try:
        db.put_end("failed", reason, time.time())
        db.commit()
    except sqlite3.OperationalError as error:  # The disk may be full.
        log.error("cannot write the run's database: %s", error)


def _lock(directory: Path) -> int:
    """Lock the run directory until this process exits. Raises DlctlError if it is locked."""
    path = directory / paths.LOCK
    with os_errors_as("cannot lock the run", path):
        descriptor = regular.descriptor(path, os.O_RDWR | os.O_CREAT, 0o600)
    if is_locked_within(GLANCE_S, descriptor):
        return descriptor
    os.close(descriptor)
    raise DlctlError("another coordinator has this run", where=str(directory), hint="dlctl status")


process.main("coordinator", coordinate)
