"""What an operation says while it works: the command line shows it, anybody else hears nothing.

Texts are plain; whoever shows them escapes what others wrote.
"""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    def note(self, text: str) -> None:
        """What is going on."""
        ...

    def warn(self, text: str) -> None:
        """What may go wrong, or has gone wrong and did not end the operation."""
        ...

    def next_step(self, hint: str, indent: str) -> None:
        """What to do next; see `dlctl.util.hints`."""
        ...


class Phases(Protocol):
    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        """The run is about to become something (ready, stopped) and waits for somebody."""
        ...


class _Nobody:
    def note(self, text: str) -> None:
        return

    def warn(self, text: str) -> None:
        return

    def next_step(self, hint: str, indent: str) -> None:
        return


_listener: Listener = _Nobody()


def listen(listener: Listener) -> None:
    """From now on only this one hears what is said."""
    global _listener
    _listener = listener


def note(text: str) -> None:
    _listener.note(text)


def warn(text: str) -> None:
    _listener.warn(text)


def next_step(hint: str, indent: str = "") -> None:
    _listener.next_step(hint, indent)
