"""Progress messages of an operation: the command line shows them, by default they are dropped.

Texts are not escaped; the listener escapes untrusted text.
"""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    def note(self, text: str) -> None:
        """Progress."""
        ...

    def warn(self, text: str) -> None:
        """A risk, or an error that did not end the operation."""
        ...


class Phases(Protocol):
    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        """The run is about to reach a state (ready, stopped) and waits for daemons."""
        ...


class _Nobody:
    def note(self, text: str) -> None:
        return

    def warn(self, text: str) -> None:
        return


_listener: Listener = _Nobody()


def listen(listener: Listener) -> None:
    """From now on only this listener receives messages."""
    global _listener
    _listener = listener


def note(text: str) -> None:
    _listener.note(text)


def warn(text: str) -> None:
    _listener.warn(text)
