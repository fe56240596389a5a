"""The mirror of a run's checkpoints before it trains: whether it can be used, and whose it is."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dlctl.errors import DlctlError
from dlctl.health.findings import FAULT, OK, Finding
from dlctl.health.needs import HERE
from dlctl.stores import addresses, checkpoint_store, ownership
from dlctl.stores.checkpoint_store import CheckpointStore, Contents
from dlctl.stores.objects import StoreError
from dlctl.util import notes, values
from dlctl.util.names import RUN_IN_ADDRESS
from dlctl.util.text import plural

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

CHECK_S = 60.0
"""A command waits no longer for an answer of the store."""
T = TypeVar("T")


def address_of(job: JobFile, run_id: str) -> str:
    """The address of a run's mirror; "" if it has none."""
    return job.checkpoints.mirror.replace(RUN_IN_ADDRESS, run_id)


class Claimed(NamedTuple):
    highest: int = 0
    """The highest number of a checkpoint that was there before."""
    release: Callable[[], None] = lambda: None
    """Undo it, for a run that does not start after all."""


def claim(directory: Path, job: JobFile, follows: Sequence[str] = (), source: str = "") -> Claimed:
    """Make the run in this directory the owner of its mirror. follows: runs that it continues;
    source: the address of the checkpoint that it starts from.

    Raises StoreError if it is another run's, or cannot be used; only warns if the store does not
    answer now: the process that uploads tries again.
    """
    if not (address := address_of(job, directory.name)):
        return Claimed()
    mine = ownership.kept(directory, address, follows)
    store = checkpoint_store.at(addresses.parse(address))
    before: list[Contents] = []

    def take() -> ownership.MirrorClaim:
        contents = store.look()
        before.append(contents)
        whose, found = contents.whose(), mine
        if whose and (source == address or source.startswith(f"{address}/")):
            found = ownership.following(mine, whose)
        if found.highest < contents.highest() and _is_new(contents, found):
            found = ownership.numbered(found, contents.highest())
        ownership.take(store.objects, contents.owner, whose, found, directory.name)
        return found

    try:
        mine = within(CHECK_S, take, address)
    except StoreError as error:
        if error.cause not in ("unreachable", "throttled"):
            raise
        notes.warn(f"{address}: {error.message}; checkpoints are mirrored once it answers")
    ownership.write(directory, mine)

    def release() -> None:
        if before and before[0].owner is None:
            store.objects.remove([ownership.NAME])

    return Claimed(mine.highest, release)


def _is_new(contents: Contents, claim: ownership.MirrorClaim) -> bool:
    """Whether the run has not written there before."""
    return contents.owner is None or contents.owner.mark != claim.mark


def within(limit_s: float, call: Callable[[], T], address: str) -> T:
    """What the call returns, if it does so in time. Raises StoreError, or what it raises."""
    found: list[T] = []
    raised: list[BaseException] = []

    def perform() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=perform, daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not found:
        raise StoreError(f"no answer within {limit_s:g} s", "unreachable", where=address)
    return found[0]


def findings(job: JobFile, run_ids: Sequence[str]) -> list[Finding]:
    """What `dlctl doctor` says of the mirror of a job, and of addresses of its weights; run_ids:
    the job's own runs. Writes an object, and removes it.
    """
    found = []
    if address := job.checkpoints.mirror:
        # Of a run that does not exist yet, whose place is new.
        found.append(_checked("mirror", address, lambda: _of_mirror(address, run_ids)))
    for weights in weights_of(job):
        found.append(_checked("weights", weights, partial(_of_weights, weights)))
    return found


def _checked(subject: str, address: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(HERE, subject, OK, within(CHECK_S, look, address))
    except DlctlError as error:
        where = f"{error.where or address}: {error.message}"
        return Finding(HERE, subject, FAULT, where, error.hint or "see above")


def _of_mirror(address: str, run_ids: Sequence[str]) -> str:
    trial = address.replace(RUN_IN_ADDRESS, f"doctor-{secrets.token_hex(4)}")
    store = checkpoint_store.at(addresses.parse(trial))
    contents = store.look()
    name = f"doctor-{secrets.token_hex(8)}"
    store.objects.create(name, b"")
    store.objects.remove([name])
    whose = contents.whose()
    if whose and whose not in run_ids:
        ownership.require_free(whose, (), ownership.new_claim(trial), "")
    return f"{address} can be read and written; {in_words(store, contents)}"


def in_words(store: CheckpointStore, contents: Contents) -> str:
    """What is there, in a few words."""
    if not contents.names:
        return "it has no checkpoint"
    made = contents.manifests[contents.names[-1]]
    count = plural(len(contents.names), "checkpoint")
    return f"it has {count}, the newest of {made['run_id']} at step {values.count(made['step'])}"


# ---------------------------------------------------------------- weights


def weights_of(job: JobFile) -> list[str]:
    """The addresses in a job's weights."""
    named = [job.job.weights, *(party.weights for party in job.parties)]
    return [text for text in dict.fromkeys(named) if addresses.is_like(text)]


def check_weights(job: JobFile) -> None:
    """Raises DlctlError if the weights at an address are not there; only warns if the store does
    not answer.
    """
    for text in weights_of(job):
        try:
            within(CHECK_S, partial(_of_weights, text), text)
        except StoreError as error:
            if error.is_lasting:
                raise
            notes.warn(f"{text}: {error.message}")


def _of_weights(text: str) -> str:
    from dlctl.stores import fetching

    sizes = fetching.sizes(text, fetching.WEIGHTS)
    return f"{text}: {plural(len(sizes), 'file')}, {values.size(sum(sizes.values()))}"
