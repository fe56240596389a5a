"""Reads the state that earlier executions of a run have recorded."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from daemons.coordinator.records import to_wall_clock
from daemons.files.log_mirror import sizes
from dlctl.errors import DlctlError
from dlctl.model import frozen
from dlctl.records.memory import Memory
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.runs import checkpoints, paths, terms
from dlctl.runs.database import RunDb
from dlctl.stores import ownership
from dlctl.util.names import LINKS


def read_past(directory: Path, db: RunDb, agents: dict[str, int]) -> Past:
    """Terms, incarnations, the checkpoint to resume from, and the memory of the previous
    coordinator. Raises DlctlError if it is unreadable. `agents`: running ones, with their
    incarnations.

    A coordinator may have died between creating a checkpoint and its row, and the next one between
    removing that checkpoint and creating its own. So the disk and the memory are checked, too: no
    checkpoint number is ever issued twice. Running daemons may know higher numbers: on a full disk,
    checkpoints (at most one a second) leave no memory, and their directory may have been removed.
    The checkpoint that the run has resumed from is not needed once all daemons work, and may have
    been removed by then. Until then the run may be moved.
    """
    memory, heard_at = db.memory(), db.run().get("updated_at")
    now, clock_s = time.time(), time.monotonic()
    resume = "" if Memory(memory).has_released else db.run().get("resume")
    restore = checkpoints.of_run(directory, resume) if resume else None
    manifest = checkpoints.read_manifest(restore) if restore else {}
    if restore:
        checkpoints.share_frozen(restore, directory / frozen.FOLDER, manifest)
    numbers = [row["number"] for row in db.checkpoints()]
    newest = max(
        *numbers,
        checkpoints.highest_number(directory),
        memory.get("checkpoints", 0),
        _highest_in_mirror(directory),
    )
    gone_s = max(0.0, now - heard_at) if memory and heard_at else 0.0
    beat_age_s = paths.beat_age_s(directory, now)
    return Past(
        terms=terms.newest(directory, db),
        incarnations=db.incarnations(),
        checkpoints=newest + (int(gone_s) if agents else 0),
        restore=str(restore or ""),
        manifest=manifest,
        settings=db.run().get("settings") or {},
        memory=memory,
        agents=agents,
        logs=sizes(directory),
        wall_s=now,
        gone_s=gone_s,
        unwritten_s=gone_s - beat_age_s if gone_s and beat_age_s else 0.0,
        totals=db.run().get("totals") or {},
        links=db.run().get(LINKS) or {},
        # The other way round: from wall-clock time.
        daemons={row["name"]: to_wall_clock(row, clock_s - now) for row in db.daemons()},
    )


def _highest_in_mirror(directory: Path) -> int:
    """The highest number that a checkpoint of an earlier run has in the mirror; 0 if none."""
    with suppress(DlctlError):  # It is damaged: the process that uploads says so.
        claim = ownership.claim_of(directory)
        return claim.highest if claim is not None else 0
    return 0
