"""A daemon's part in checkpoints: each is saved once, however often it is asked for.

A repeated `Save` gets the answer that there was. To write the file again would change it behind the
manifest, which may know the hash of the first one by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from dlctl import messages as m
from dlctl.machine import Exit
from dlctl.messages import Array, Json, Save, Saved
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import ArraysSaved, LoadArrays, LoadFrozen, SaveArrays
from dlctl.roles.protocol.files import FileSealed, FilesMissing, Transfers


@dataclass(frozen=True, slots=True)
class _Current:
    checkpoint: int
    file: str
    state: Json


class Saving:
    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.name = name
        self._current: _Current | None = None
        self._answer: Saved | None = None

    @property
    def newest(self) -> int:
        """Number of the newest checkpoint that is being saved here, or is answered; 0: of none."""
        newest = self._current or self._answer
        return newest.checkpoint if newest is not None else 0

    def is_writing(self) -> bool:
        """Whether the arrays that were given are still needed as they are."""
        return self._current is not None

    def is_new(self, save: Save) -> bool:
        """Whether to save now. A repeated request is answered here, an outdated one is dropped."""
        if self._answer is not None and save.checkpoint <= self._answer.checkpoint:
            if save.checkpoint == self._answer.checkpoint:
                self.context.send(COORDINATOR, self._answer)
            return False
        return self._current is None

    def begin(self, save: Save, file: str, arrays: Mapping[str, Array], state: Json) -> None:
        """Write `file`; the arrays must not change any more."""
        self._current = _Current(save.checkpoint, file, state)
        self.context.do(SaveArrays(save.checkpoint, save.directory, file, arrays))

    def on_saved(self, event: ArraysSaved) -> None:
        current = self._current
        if current is None or current.checkpoint != event.checkpoint:
            return
        self._current = None
        file = current.file if not event.error else ""
        self._reply(
            Saved(
                event.checkpoint, self.name, file, event.sha256, event.nbytes, current.state,
                event.error,
            )
        )  # fmt: skip

    def without_file(self, save: Save, error: str) -> None:
        """Nothing is saved here: as it should be if there is no `error`."""
        self._reply(Saved(save.checkpoint, self.name, "", "", 0, {}, error))

    def _reply(self, saved: Saved) -> None:
        self._answer = saved
        self.context.send(COORDINATOR, saved)


class Restoring:
    """A daemon's way to its arrays in a checkpoint, or to the run's frozen parameters, wherever
    these are.

    Beside the coordinator they are simply read. On another host the driver says which files it has
    not (`FilesMissing`), they are fetched from the coordinator, and it is tried again: first the
    manifest comes, then what this daemon needs according to it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._transfers = Transfers(context)
        self._load: LoadArrays | LoadFrozen | None = None
        self._missing: set[str] = set()

    def load(self, effect: LoadArrays | LoadFrozen) -> None:
        """Answered as the effect says; what cannot be had ends the daemon with the reason."""
        self._load = effect
        self.context.do(effect)

    def on_event(self, event: FilesMissing | FileSealed, now: float) -> None:
        if isinstance(event, FileSealed):
            self._transfers.on_sealed(event, now)
            return
        self._missing = {wanted.file for wanted in event.files}
        for wanted in event.files:
            done = partial(self._on_fetched, wanted.file)
            self._transfers.fetch(COORDINATOR, wanted, done, now)

    def on_data(self, message: m.FileData, now: float) -> None:
        """A piece of a file. Raises RemoteProtocolError if it is not the coordinator's."""
        self._transfers.on_data(message, now)

    def _on_fetched(self, file: str, error: str, now: float) -> None:
        self._missing.discard(file)
        if error:
            text = f"cannot fetch {file} from the coordinator: {error}"
            self.context.note("error", text)
            self.context.do(Exit(1, text))
        elif not self._missing and self._load is not None:
            self.context.do(self._load)

    def deadline(self) -> float | None:
        return self._transfers.deadline()

    def on_deadline(self, now: float) -> None:
        self._transfers.on_deadline(now)
