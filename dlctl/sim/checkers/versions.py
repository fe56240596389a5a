"""The parameters of servers at the versions that their answers are of.

An answer leaves when the commits before it are durable, and by then its shard has gone on.
"""

from __future__ import annotations

from typing import NamedTuple

from dlctl.compress.values import as_float32
from dlctl.sim.process import Process
from dlctl.wire.messages import Array


class SeenParameters(NamedTuple):
    exact: Array
    seen: Array
    """The parameters as workers see them: perhaps rounded."""


class Versions:
    def __init__(self) -> None:
        self._passed: dict[tuple[Process, int], SeenParameters] = {}

    def on_message(self, process: Process) -> None:
        """A process is about to handle a message, which may change its shard."""
        commits = getattr(process.machine, "commits", None)
        serving = getattr(process.machine, "serving", None)
        if commits is not None and commits.under_way and serving is not None:
            key = (process, serving.shard.version)
            if key not in self._passed:
                exact, seen = _present(process)
                self._passed[key] = SeenParameters(exact.copy(), seen.copy())

    def of(self, server: Process, version: int) -> SeenParameters:
        """Views, valid until the server handles a message."""
        present: int = server.machine.serving.shard.version  # type: ignore[attr-defined]
        return _present(server) if version == present else self._passed[server, version]


def _present(server: Process) -> SeenParameters:
    serving = server.machine.serving  # type: ignore[attr-defined]
    return SeenParameters(serving.shard.w, as_float32(serving.parameters.summary.of(serving.shard)))
