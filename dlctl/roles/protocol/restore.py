"""A daemon's way to its arrays in a checkpoint, or to the run's frozen parameters, wherever these
are.

Beside the coordinator they are simply read. On another host the driver says which files it has not
(`FilesMissing`), they are fetched from the coordinator, and it is tried again: first the manifest
comes, then what this daemon needs according to it.
"""

from __future__ import annotations

from functools import partial

from dlctl import messages as m
from dlctl.machine import Exit
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import LoadArrays, LoadFrozen
from dlctl.roles.protocol.files import FileSealed, FilesMissing, Transfers


class Restoring:
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
