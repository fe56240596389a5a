"""Which run writes its checkpoints at an address: `run.json` there, and the claim of the run,
`mirror.json` in its directory.

A run that starts from a checkpoint at the address takes it over, and its numbers go on where those
before it end. A run that has been replaced, because its machine was thought to be lost, finds
another owner and writes no more. All other runs are refused.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.runs import lineage, paths
from dlctl.runs.lineage import Resume
from dlctl.stores.layout import OWNER
from dlctl.stores.objects import NoObject, Objects, StoreError
from dlctl.util import regular

NAME = OWNER
CLAIM = "mirror.json"
SCHEMA = "dlctl.mirror/1"
BEFORE_MAX = 1000
MODE = 0o644


@dataclass(frozen=True, slots=True)
class MirrorOwner:
    run_id: str
    mark: str
    """Random, and known to the run: another one may have the same name."""
    before: tuple[str, ...] = ()
    """The runs that it has taken the address over from, the newest last."""
    resumes: tuple[tuple[int, int], ...] = ()
    """(checkpoint, highest number then) of all resumes of the run, see `lineage.Resume`."""

    def branch(self) -> list[Resume]:
        """Which checkpoints here count, for `lineage.is_of_branch`."""
        return lineage.chain([Resume(number, highest, {}) for number, highest in self.resumes])


@dataclass(frozen=True, slots=True)
class MirrorClaim:
    """That of a run on an address, in its directory."""

    address: str
    mark: str
    follows: tuple[str, ...] = ()
    """Runs whose place it may take: it begins with a checkpoint of theirs."""
    highest: int = 0
    """The highest number there when it began: it issues higher ones only."""


def new_claim(address: str, follows: Sequence[str] = (), highest: int = 0) -> MirrorClaim:
    return MirrorClaim(address, secrets.token_hex(16), tuple(follows), highest)


def read(objects: Objects) -> MirrorOwner | None:
    """Raises StoreError, also for a file that is no such record."""
    try:
        data = json.loads(objects.read(NAME))
        resumes = tuple((int(number), int(highest)) for number, highest in data["resumes"])
        before = tuple(str(name) for name in data["before"])
        return MirrorOwner(str(data["run_id"]), str(data["mark"]), before, resumes)
    except NoObject:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what, where = f"{NAME} is not one of dlctl", f"{objects.address}/{NAME}"
        hint = "choose another address, or remove that file"
        raise StoreError(what, "foreign", where=where, hint=hint) from error


def require_free(owner: str, before: Sequence[str], claim: MirrorClaim, run_id: str) -> None:
    """Raises StoreError if another run writes there. owner: its name; "": nobody's."""
    if not owner or owner == run_id or {owner, *before} & set(claim.follows):
        return
    address = claim.address
    raise StoreError(
        f"it has the checkpoints of {owner}", "foreign", where=address,
        hint=f"dlctl start --from {address} JOBFILE\ncontinues that run\n"
        "or choose another address in mirror of [checkpoints], for example with {run} in it",
    )  # fmt: skip


def take(
    objects: Objects,
    found: MirrorOwner | None,
    whose: str,
    claim: MirrorClaim,
    run_id: str,
    resumes: Sequence[Resume] | None = None,
) -> MirrorOwner:
    """Make the run the owner. found: the present one; whose: the run that has checkpoints there;
    "": there is nothing to lose. resumes: None leaves them as they are. Raises StoreError if it is
    another run's.
    """
    is_own = found is not None and found.mark == claim.mark
    before = found.before if found is not None else ()
    if not is_own:
        if found is not None and whose == run_id and run_id not in claim.follows:
            whose = f"another {run_id}"  # Its name is random, and short.
        require_free(whose, before, claim, run_id)
    if found is not None and not is_own:
        before = (*before, found.run_id)[-BEFORE_MAX:]
    pairs = found.resumes if found is not None and is_own else ()
    if resumes is not None:
        pairs = tuple((resume.checkpoint, resume.highest) for resume in resumes)
    now = MirrorOwner(run_id, claim.mark, before, pairs)
    if found is None:
        if not objects.create(NAME, _bytes(now)):
            return take(objects, read(objects), whose, claim, run_id, resumes)
    elif found != now:
        objects.replace(NAME, _bytes(now))
    return now


def retake(
    objects: Objects,
    found: MirrorOwner | None,
    whose: str,
    claim: MirrorClaim,
    run_id: str,
    resumes: Sequence[Resume],
) -> MirrorOwner:
    """`take` for a run that goes on, where nobody has just said that it shall. Raises StoreError
    too if another run has replaced it: each would take the place of the other, again and again.
    """
    if found is not None and found.mark != claim.mark and whose:
        has_been_replaced = run_id in found.before or found.run_id not in claim.follows
        if has_been_replaced:
            raise _lost(claim, found.run_id)
    return take(objects, found, whose, claim, run_id, resumes)


def confirm(objects: Objects, claim: MirrorClaim) -> None:
    """Raises StoreError if another run has become the owner."""
    found = read(objects)
    if found is None or found.mark != claim.mark:
        raise _lost(claim, found.run_id if found is not None else "nobody")


def _lost(claim: MirrorClaim, owner: str) -> StoreError:
    what = f"it is no longer this run's, but of {owner}"
    hint = "stop that one; dlctl stop and dlctl start of this one take the place again"
    return StoreError(what, "foreign", where=claim.address, hint=hint)


def _bytes(owner: MirrorOwner) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(owner)}, indent=1).encode()


# ---------------------------------------------------------------- in the run directory


def claim_of(directory: Path) -> MirrorClaim | None:
    """The claim of a run; None if it has none. Raises DlctlError if it is damaged."""
    path = directory / CLAIM
    try:
        data: dict[str, Any] = json.loads(regular.read_bytes(path))
        follows = tuple(str(name) for name in data["follows"])
        return MirrorClaim(str(data["address"]), str(data["mark"]), follows, int(data["highest"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"this is not the claim of a run on its mirror: {error}"
        raise DlctlError(what, where=str(path), hint=f"rm {path}") from error


def write(directory: Path, claim: MirrorClaim) -> None:
    """Raises OSError."""
    paths.write(directory / CLAIM, json.dumps(asdict(claim), indent=1).encode(), MODE)


def following(claim: MirrorClaim, run_id: str) -> MirrorClaim:
    """The same, which may also take the place of this run."""
    return replace(claim, follows=tuple(dict.fromkeys((*claim.follows, run_id))))


def numbered(claim: MirrorClaim, highest: int) -> MirrorClaim:
    """The same of a run that issues higher numbers only."""
    return replace(claim, highest=highest)


def kept(directory: Path, address: str, follows: Sequence[str] = ()) -> MirrorClaim:
    """The claim of a run on this address: the one that it has, or a new one. Raises DlctlError."""
    found = claim_of(directory)
    if found is not None and found.address == address:
        return replace(found, follows=tuple(dict.fromkeys((*found.follows, *follows))))
    return new_claim(address, follows)
