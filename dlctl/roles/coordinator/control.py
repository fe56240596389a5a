"""What a part of the coordinator may ask of the coordinator as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dlctl.messages import Json
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.protocol.effects import ProcessEnded


class Control(Protocol):
    def end(
        self,
        state: str,
        reason: str,
        now: float,
        save: bool = True,
        grace_s: float | None = None,
        at_once: bool = False,
    ) -> None:
        """Bring the run to an end: `state` is stopped, finished or failed.

        save: with a last checkpoint. grace_s: for workers to drain. at_once: only the processes
        are to be ended.
        """
        ...

    def change_state(self, state: str, reason: str, now: float) -> None: ...

    def begin_checkpoint(self, now: float, listener: Callable[[Json], None] | None) -> None:
        """`listener` gets the checkpoint's row when it is done."""
        ...

    def start_daemon(self, daemon: Daemon, now: float) -> None:
        """Start the next incarnation of a daemon."""
        ...

    def admit_members(self, now: float) -> None:
        """Have exactly the present daemons connect to the coordinator, and workers to servers."""
        ...

    def notify_members(self, server: Daemon | None = None) -> None:
        """Tell servers, or this one, which workers take part."""
        ...

    def process_ended(self, end: ProcessEnded, now: float) -> None:
        """The process of a daemon has ended, or must be taken for ended."""
        ...
