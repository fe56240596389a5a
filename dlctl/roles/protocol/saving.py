"""A daemon's part in checkpoints: each is saved once, however often it is asked for.

A repeated `Save` gets the answer that there was. To write the file again would change it behind the
manifest, which may know the hash of the first one by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlctl.messages import Array, Json, Save, Saved
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import ArraysSaved, SaveArrays


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
