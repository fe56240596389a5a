"""The run's parameters at its end, for a training loop of the user's own: what a script saves when
its loop is over.

They are read when the last checkpoint is asked for. Then no replica pushes any more, and the
coordinator waits for this worker's part of the checkpoint, so that the servers are still there.
"""

from __future__ import annotations

from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.loop_effects import KeepModel
from dlctl.roles.worker.fetching import Fetched
from dlctl.roles.worker.interface import Evaluable
from dlctl.roles.worker.joining import buffers_key
from dlctl.wire import messages as m

READ_S = 30.0
"""For the answers of all servers; after that the loop keeps its replica's own values."""


class LastRead:
    def __init__(self, context: Context, *, reads: bool) -> None:
        """reads: this worker's loop is the one that saves."""
        self._context, self._reads = context, reads
        self._save: m.Save | None = None
        """Asked for, and not passed on yet."""
        self._fetched: Fetched | None = None
        self._number = 0
        """Of the request for the buffers."""
        self._buffers: m.Buffers | None = None
        self._until = 0.0

    def begin(self, message: m.Save, replica: Evaluable, now: float) -> bool:
        """Read for the last checkpoint. False: it is another one, or nothing is to be read."""
        links = replica.links
        if not (self._reads and message.is_last and links.channels):
            return False
        if self._fetched is not None:
            return self._save is not None
        self._save, self._until = message, now + READ_S
        self._fetched = replica.fetcher.start(0, whole=True)
        me, number = links.identity, self._fetched.request
        self._number = number
        request = m.FetchBuffers(me.slot, me.term, number)
        self._context.ask(buffers_key(number), links.channels[0].peer, request, now)
        return True

    def on_buffers(self, message: m.Buffers) -> None:
        if self._fetched is not None and message.request == self._number:
            self._buffers = message

    def advance(self, replica: Evaluable, now: float) -> m.Save | None:
        """The save, once the values have come or the time is over."""
        save, fetched, buffers = self._save, self._fetched, self._buffers
        if save is None or fetched is None:
            return None
        if fetched.complete and buffers is not None:
            parameters = replica.fetcher.assemble(fetched, replica.side.parameters)
            self._context.do(KeepModel(parameters, buffers.averaged))
        elif now < self._until:
            return None
        else:
            self.give_up(f"for {READ_S:g} s")
        self._save = None
        return save

    def give_up(self, why: str) -> None:
        """The loop keeps what it has."""
        if self._save is None:
            return
        self._save = None
        self._context.note(
            "warning",
            f"the servers have not sent the run's last parameters {why}: run.save writes those of "
            "this replica; dlctl checkpoint export writes the run's",
        )

    def deadline(self) -> float | None:
        return self._until if self._save is not None else None
