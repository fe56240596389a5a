"""Progress messages of an operation: the command line shows them, by default they are dropped.

Texts are not escaped; the listener escapes untrusted text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Phases(Protocol):
    def phase(self, state: str, waiting: str, waited_s: float) -> None:
        """The run is about to reach a state (ready, stopped) and waits for daemons."""
        ...


Listener = Callable[[str], None]


def _drop(text: str) -> None:
    return


_note: Listener = _drop
_warn: Listener = _drop


def listen(on_note: Listener, on_warn: Listener) -> None:
    """Set the functions that receive messages from now on."""
    global _note, _warn
    _note, _warn = on_note, on_warn


def note(text: str) -> None:
    """Report the progress of an operation to the user."""
    _note(text)


def warn(text: str) -> None:
    """A risk, or an error that did not end the operation."""
    _warn(text)
