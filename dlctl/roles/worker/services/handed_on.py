"""The model's buffers where replicas work one after the other, and hand them on.

They go with each push of parameters, and are the run's if that is applied: so whoever reads both
has the buffers of the same batches. They are read behind the parameters, after every read into the
model: those of a batch that was dropped, because the run had it, are given up by that.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from dlctl.roles.protocol.effects import LoadBuffers
from dlctl.roles.worker.joining import buffers_key
from dlctl.roles.worker.links import Links
from dlctl.wire import messages as m


class HasBuffers(Protocol):
    averaged: m.Array
    """float64[n], the buffers of the model."""


class HandedOn:
    def __init__(self, links: Links, model: HasBuffers) -> None:
        self._links, self._model = links, model
        self._number = 0
        """Of the newest request for the buffers."""
        self._state: Literal["", "wanted", "asked", "loading"] = ""

    @property
    def waits(self) -> bool:
        """Whether the model has not the buffers of the newest read."""
        return bool(self._state)

    def want(self, number: int) -> None:
        """The parameters of this request are in the model: read the buffers."""
        self._number, self._state = number, "wanted"

    def advance(self, now: float) -> None:
        if self._state != "wanted":
            return
        self._state = "asked"
        me, server = self._links.identity, self._links.channels[0].peer
        request = m.FetchBuffers(me.slot, me.term, self._number)
        nbytes = self._model.averaged.nbytes
        self._links.context.ask(buffers_key(self._number), server, request, now, nbytes)

    def on_buffers(self, message: m.Buffers) -> None:
        if self._state != "asked" or message.request != self._number:
            return
        if np.array_equal(message.averaged, self._model.averaged):
            self._state = ""
            return
        self._state, self._model.averaged = "loading", np.array(message.averaged)
        self._links.context.do(LoadBuffers(self._model.averaged))

    def on_loaded(self) -> None:
        if self._state == "loading":
            self._state = ""

    def packed(self) -> m.Packed:
        """What goes with a push."""
        values = self._model.averaged
        return m.Packed("none", values.size, (values,))
