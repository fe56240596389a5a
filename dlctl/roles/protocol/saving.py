"""A daemon's part in checkpoints: each is saved once, however often it is requested.

A repeated `Save` gets the stored answer. Rewriting the file could invalidate its hash in the
manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import ArraysSaved, LoadArrays, LoadFrozen, SaveArrays
from dlctl.roles.protocol.files import FileSealed, FilesMissing, Transfers
from dlctl.wire.machine import Exit
from dlctl.wire.messages import Array, Json, Save, Saved


class Saving:
    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.name = name
        self._current: Saved | None = None
        """The answer once the file is written, which lacks its checksum and size."""
        self._answer: Saved | None = None

    @property
    def newest(self) -> int:
        """Number of the newest checkpoint that is being saved, or is answered; 0: none."""
        newest = self._current or self._answer
        return newest.checkpoint if newest is not None else 0

    def is_writing(self) -> bool:
        """Whether the given arrays are still being written, and must not change."""
        return self._current is not None

    def is_new(self, save: Save) -> bool:
        """Whether to save now. A duplicate request is answered here, a stale one is dropped."""
        if self._answer is not None and save.checkpoint <= self._answer.checkpoint:
            if save.checkpoint == self._answer.checkpoint:
                self.context.send(COORDINATOR, self._answer)
            return False
        return self._current is None

    def begin(self, save: Save, file: str, arrays: Mapping[str, Array], state: Json) -> None:
        """Write `file`; the arrays must not change any more."""
        self._current = Saved(save.checkpoint, self.name, file, "", 0, state, "")
        self.context.do(SaveArrays(save.checkpoint, save.directory, file, arrays))

    def on_saved(self, event: ArraysSaved) -> None:
        current = self._current
        if current is None or current.checkpoint != event.checkpoint:
            return
        self._current = None
        file = "" if event.error else current.file
        of = (event.sha256, event.nbytes, current.state, event.error)
        self._reply(Saved(current.checkpoint, self.name, file, *of))

    def without_file(self, save: Save, error: str) -> None:
        """Answer that nothing is saved here, which is correct if there is no `error`."""
        self._reply(Saved(save.checkpoint, self.name, "", "", 0, {}, error))

    def _reply(self, saved: Saved) -> None:
        self._answer = saved
        self.context.send(COORDINATOR, saved)


class Restoring:
    """Loads a daemon's arrays from a checkpoint, or the run's frozen parameters, on any host.

    On the coordinator's host they are read directly. On another host the driver reports missing
    files (`FilesMissing`), they are fetched from the coordinator, and the load is retried: first
    the manifest is fetched, then the files that this daemon needs according to it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.transfers = Transfers(context)
        self._load: LoadArrays | LoadFrozen | None = None

    def load(self, effect: LoadArrays | LoadFrozen) -> None:
        """Answered as the effect says; if a file cannot be fetched, the daemon exits with the
        reason.
        """
        self._load = effect
        self.context.do(effect)

    def on_event(self, event: FilesMissing | FileSealed, now: float) -> None:
        if isinstance(event, FileSealed):
            self.transfers.on_sealed(event, now)
            return
        for wanted in event.files:
            done = partial(self._on_fetched, wanted.file)
            self.transfers.fetch(COORDINATOR, wanted, done, now)

    def _on_fetched(self, file: str, error: str, now: float) -> None:
        if error:
            text = f"cannot fetch {file} from the coordinator: {error}"
            self.context.note("error", text)
            self.context.do(Exit(1, text))
        elif self._load is not None and not self.transfers.is_busy():
            self.context.do(self._load)
