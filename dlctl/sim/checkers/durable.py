"""Nobody sees a state of a server that a power loss undoes."""

from __future__ import annotations

from typing import Any

from dlctl.sim.checkers.base import Checker
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send


class DurableChecker(Checker):
    """No version of the parameters leaves a server, to workers or to the coordinator, before the
    next server would find it or a later one.
    """

    def __init__(self) -> None:
        self._durable: dict[Process, int] = {}
        """A version that the next server would have found."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        if not isinstance(effect, Send) or getattr(process.machine, "storages", None) is None:
            return
        version = _version_in(effect.message)
        if version is not None and version > self._durable.get(process, 0):
            machine: Any = process.machine
            found = machine.storages.survivor(machine.serving.shard.optimizer)
            if found is not None and found.version < version:
                raise self.broken(
                    f"{process} tells of version {version}; its successor would be at version "
                    f"{found.version}: {effect.message!r}"
                )
            self._durable[process] = version


def _version_in(message: m.Message) -> int | None:
    match message:
        case m.Ack(table=0) | m.Parameters(table=0) | m.SparseParameters(table=0) | m.Joined():
            return message.version
        case m.Report():
            return message.metrics.get("version")
    return None
