"""The kind and the size of an event, by which its costs are recorded and simulated."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from dlctl.wire.machine import Event, Received
from dlctl.wire.messages import Message, Packed

_OF_ARRAYS = ("Array", "Packed", "bytes")
"""Words in the types of fields that are sent as raw frames."""
_FIELDS: dict[type[Message], tuple[str, ...]] = {}
"""Those fields, by the type of the message."""


def kind_of(event: Event) -> str:
    """The type of the message, or of the event itself."""
    return type(event.message if isinstance(event, Received) else event).__name__


def nbytes_of(event: Event, scale: float = 1.0) -> int:
    """Bytes of the arrays in the message; 0 without a message. scale: as of `payload_bytes`."""
    return payload_bytes(event.message, scale) if isinstance(event, Received) else 0


def payload_bytes(message: Message, scale: float = 1.0) -> int:
    """Bytes of its raw frames: arrays, packed vectors and byte strings. scale: the arrays count as
    if they were larger by this factor; names and digests are what they are.
    """
    names = _FIELDS.get(type(message))
    if names is None:
        names = _FIELDS[type(message)] = tuple(
            each.name
            for each in fields(message)
            if any(word in str(each.type) for word in _OF_ARRAYS)
        )
    total = 0.0
    for name in names:
        value = getattr(message, name)
        total += len(value) if isinstance(value, bytes) else scale * _nbytes(value)
    return int(total)


def _nbytes(value: object) -> int:
    if isinstance(value, np.ndarray | Packed):
        return int(value.nbytes)
    if isinstance(value, tuple):
        return sum(map(_nbytes, value))
    return len(value) if isinstance(value, bytes) else 0
