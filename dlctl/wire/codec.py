"""Message <-> frames: [header, raw buffer, raw buffer, ...].

The header is msgpack, at most 64 KiB: [PROTOCOL, code, fields, buffers]. `fields` are in the order
of the dataclass; the content of an array, a Packed or bytes is in the following raw frames, which
`buffers` describes: [dtype code, length]. A frame whose size does not match the header is refused.
Nothing is ever unpickled, no dtype or class is looked up by a name from the wire, and every value
is checked for its exact type before a machine receives it. A message has a single encoding: a
header that `encode` would have written differently (a duplicate key, a longer form of a number) is
refused, so that no two readers can interpret it differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from dlctl.errors import LocalProtocolError, RemoteProtocolError
from dlctl.wire.messages import FINITE, MESSAGES, NATURAL, Array, Json, Message, NumberRange, Packed

PROTOCOL = 19
HEADER_BYTES_MAX = 64 * 1024
FRAME_BYTES_MAX = 2**34
FRAMES_MAX = 34
STRING_MAX = 32 * 1024
DEPTH_MAX = 8
LISTS_MAX = DEPTH_MAX + 2
"""Nesting depth of lists and maps in a header: its own two, and those of the deepest `Json`."""

DTYPES = [np.dtype(name) for name in ("<f4", "<f2", "<f8", "u1", "<u2", "<u4", "<i4", "<i8")]
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_LIMITS = {
    "strict_map_key": True,
    "raw": False,
    "max_str_len": STRING_MAX,
    "max_bin_len": 0,
    "max_array_len": 4096,
    "max_map_len": 1024,
    "max_ext_len": 0,
}

Frame = bytes | memoryview
Frames = list[Frame]
_pack = msgpack.Packer(unicode_errors="backslashreplace").pack


# ---------------------------------------------------------------- out


def encode(message: Message) -> Frames:
    """Frames of a message. Arrays are not copied: they must not change until the frames are sent.

    Raises LocalProtocolError if there are too many arrays, or if the header is too large or holds
    what msgpack has no form for.
    """
    buffers: Frames = []
    shapes: list[list[int]] = []
    values = [_outgoing(getattr(message, f), buffers, shapes) for f in _names(type(message))]
    try:
        header = _pack([PROTOCOL, message.code, values, shapes])
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot encode {type(message).__name__}: {error}") from error
    if len(header) > HEADER_BYTES_MAX:
        raise LocalProtocolError(f"header of {type(message).__name__} has {len(header)} bytes")
    if len(buffers) >= FRAMES_MAX:
        raise LocalProtocolError(f"{type(message).__name__} has {len(buffers)} arrays, too many")
    return [header, *buffers]


def _outgoing(value: Any, buffers: Frames, shapes: list[list[int]]) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype not in _DTYPE_CODES:
            raise LocalProtocolError(f"cannot send an array {value.dtype}{list(value.shape)}")
        contiguous = np.ascontiguousarray(value)
        buffers.append(contiguous.data.cast("B") if value.size else b"")
        shapes.append([_DTYPE_CODES[value.dtype], value.size])
        return None
    if isinstance(value, bytes):
        buffers.append(value)
        shapes.append([3, len(value)])
        return None
    if isinstance(value, Packed):
        for array in value.arrays:
            _outgoing(array, buffers, shapes)
        return [value.kind, value.length, len(value.arrays)]
    return value


# ---------------------------------------------------------------- in


def decode(frames: Sequence[Frame]) -> Message:
    """The message of some frames. Arrays are read-only views of them: one copy less.

    Raises RemoteProtocolError, and only that, for anything that `encode` would not have made.
    """
    kind, values, shapes = _read_header(frames)
    arrays = iter(_read_buffers(frames[1:], shapes))
    checkers = _checkers(kind)
    if type(values) is not list or len(values) != len(checkers):
        raise RemoteProtocolError(f"{kind.__name__} has {len(checkers)} fields")
    try:
        message = kind(*[check(v, arrays) for check, v in zip(checkers, values, strict=True)])
    except (ValueError, StopIteration) as error:
        raise RemoteProtocolError(f"{kind.__name__}: {error}") from None
    if next(arrays, None) is not None:
        raise RemoteProtocolError(f"{kind.__name__} has more frames than fields for them")
    return message


def kind(frames: Sequence[Frame]) -> type[Message]:
    """The type of the message, by its header alone. Raises RemoteProtocolError."""
    return _read_header(frames)[0]


def _read_header(frames: Sequence[Frame]) -> tuple[type[Message], Any, Any]:
    if not 1 <= len(frames) <= FRAMES_MAX:
        raise RemoteProtocolError(f"{len(frames)} frames; at most {FRAMES_MAX}")
    if len(frames[0]) > HEADER_BYTES_MAX:
        raise RemoteProtocolError(f"header of {len(frames[0])} bytes; at most {HEADER_BYTES_MAX}")
    _refuse_deep(bytes(frames[0]))
    try:
        header = msgpack.unpackb(frames[0], **_LIMITS)
    except (ValueError, RecursionError, TypeError) as error:
        raise RemoteProtocolError(f"header is not msgpack of our kind: {error}") from None
    if type(header) is not list or len(header) != 4:
        raise RemoteProtocolError("header is not [protocol, code, fields, buffers]")
    protocol, code, values, shapes = header
    if type(protocol) is not int or protocol != PROTOCOL:
        raise RemoteProtocolError(f"peer speaks protocol {_short(protocol)}, we speak {PROTOCOL}")
    if type(code) is not int or code not in MESSAGES:
        raise RemoteProtocolError(f"no message has code {_short(code)}")
    if _pack(header) != frames[0]:
        raise RemoteProtocolError(f"{MESSAGES[code].__name__} is written in another form than ours")
    return MESSAGES[code], values, shapes


def _short(value: Any) -> str:
    """A value of a wrong type, for an error message; lists may be too deep to be shown."""
    return repr(value) if type(value) is int else f"of type {type(value).__name__}"


_WIDTHS = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4,
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
"""msgpack's types followed by a length: bytes of the length."""
_SIZES = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
"""msgpack's types of a fixed size: bytes after the type."""
_LISTS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""msgpack's types of lists and maps; the same bytes may also be a part of a text or a number."""


def _refuse_deep(data: bytes) -> None:
    """Raises RemoteProtocolError for lists and maps that are nested deeper than `LISTS_MAX`.

    msgpack allocates all items of a list before it has read one of them, down to 1024 levels: 3 kB
    would take 33 MB. In most headers there are not even enough bytes that could
    begin a list; to count them takes a hundredth of the time.
    """
    if len(data) - len(data.translate(None, _LISTS)) <= LISTS_MAX:
        return
    left: list[int] = []
    """Remaining items of each open list."""
    at = 0
    while at < len(data):
        items, at = _skip(data, at)
        if items:
            left.append(items)
            if len(left) > LISTS_MAX:
                raise RemoteProtocolError("header is nested too deeply")
            continue
        while left:
            left[-1] -= 1
            if left[-1]:
                break
            left.pop()


def _skip(data: bytes, at: int) -> tuple[int, int]:
    """(items of the list or map that begins here, else 0; where its items or the next value are)"""
    kind = data[at]
    at += 1
    if kind < 0x80 or kind >= 0xE0:
        return 0, at
    if kind < 0xA0:
        return (kind & 15) * (2 if kind < 0x90 else 1), at
    if kind < 0xC0:
        return 0, at + (kind & 31)
    if kind not in _WIDTHS:
        return 0, at + _SIZES.get(kind, 0)
    length = int.from_bytes(data[at : at + _WIDTHS[kind]], "big")
    at += _WIDTHS[kind]
    if kind >= 0xDC:
        return length * (2 if kind >= 0xDE else 1), at
    return 0, at + length + (1 if kind in (0xC7, 0xC8, 0xC9) else 0)


def _read_buffers(frames: Sequence[Frame], shapes: Any) -> list[Array]:
    if type(shapes) is not list or len(shapes) != len(frames):
        raise RemoteProtocolError("header and number of frames differ")
    return [_read_buffer(frame, shape) for frame, shape in zip(frames, shapes, strict=True)]


def _read_buffer(frame: Frame, shape: Any) -> Array:
    if type(shape) is not list or [type(n) for n in shape] != [int, int]:
        raise RemoteProtocolError("a buffer is described by [dtype code, length]")
    code, length = shape
    if not 0 <= code < len(DTYPES) or not 0 <= length <= FRAME_BYTES_MAX:
        raise RemoteProtocolError("no such dtype or length")
    if len(frame) != length * DTYPES[code].itemsize:
        raise RemoteProtocolError(f"a frame has {len(frame)} bytes, not {length} x {DTYPES[code]}")
    return np.frombuffer(frame, DTYPES[code])


# ---------------------------------------------------------------- one checker per field type

_Arrays = Iterator[Array]
_Checker = Callable[[Any, _Arrays], Any]


def _number(kind: type[int] | type[float], limits: NumberRange) -> _Checker:
    least, most = limits.least, limits.most  # Every field of every message comes here.

    def check(value: Any, _: _Arrays) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}")
        if not least <= value <= most and not limits.allow(value):
            raise ValueError(f"expected {kind.__name__} from {least:g} to {most:g}")
        return value

    return check


def _exactly(kind: type) -> _Checker:
    def check(value: Any, _: _Arrays) -> Any:
        if type(value) is not kind:
            raise ValueError(f"expected {kind.__name__}")
        return value

    return check


def _items(check: _Checker) -> _Checker:
    def check_all(value: Any, arrays: _Arrays) -> tuple[Any, ...]:
        if type(value) is not list:
            raise ValueError("expected a list")
        return tuple([check(item, arrays) for item in value])

    return check_all


def _json(value: Any, arrays: _Arrays) -> Json:
    if type(value) is not dict:
        raise ValueError("expected a map")
    _check_plain(value, DEPTH_MAX)
    return value


_PLAIN = (str, int, float, bool, type(None))


def _check_plain(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError("nested too deeply")
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            raise ValueError("expected text as keys")
        value = list(value.values())
    if type(value) is list:
        for item in value:
            _check_plain(item, depth - 1)
    elif type(value) not in _PLAIN:
        raise ValueError(f"expected plain data, not {type(value).__name__}")


def _array(value: Any, arrays: _Arrays) -> Array:
    if value is not None:
        raise ValueError("expected an array")
    return next(arrays)


def _bytes(value: Any, arrays: _Arrays) -> bytes:
    array = _array(value, arrays)
    if array.dtype != DTYPES[3]:
        raise ValueError("expected bytes")
    return array.tobytes()


def _packed(value: Any, arrays: _Arrays) -> Packed:
    if type(value) is not list or len(value) != 3 or type(value[0]) is not str:
        raise ValueError("expected [compressor, length, arrays]")
    length, count = _natural(value[1], arrays), _natural(value[2], arrays)
    if count > FRAMES_MAX:
        raise ValueError("too many arrays")
    return Packed(value[0], length, tuple([next(arrays) for _ in range(count)]))


_natural = _number(int, NATURAL)


def limits_of(hint: Any) -> NumberRange | None:
    """The range that a field of this type may have; None: it is not a number."""
    if get_origin(hint) is Annotated:
        return next(found for found in hint.__metadata__ if isinstance(found, NumberRange))
    return {int: NATURAL, float: FINITE}.get(hint)


def _checker(hint: Any) -> _Checker:
    if get_origin(hint) is tuple:
        return _items(_checker(get_args(hint)[0]))
    if (limits := limits_of(hint)) is not None:
        return _number(getattr(hint, "__origin__", hint), limits)
    return _BY_TYPE[str(hint)]


_BY_TYPE: dict[str, _Checker] = {
    str(str): _exactly(str),
    str(bool): _exactly(bool),
    str(bytes): _bytes,
    str(Json): _json,
    str(Array): _array,
    str(Packed): _packed,
}


# A process never receives most of the messages: their fields are looked up on first use.
_NAMES: dict[type[Message], list[str]] = {}
_CHECKERS: dict[type[Message], list[_Checker]] = {}


def _names(kind: type[Message]) -> list[str]:
    if kind not in _NAMES:
        _NAMES[kind] = [field.name for field in fields(kind)]
    return _NAMES[kind]


def _checkers(kind: type[Message]) -> list[_Checker]:
    if kind not in _CHECKERS:
        hints = get_type_hints(kind, include_extras=True)
        _CHECKERS[kind] = [_checker(hints[name]) for name in _names(kind)]
    return _CHECKERS[kind]
