"""Every message survives the wire, whatever its fields hold."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st

from dlctl.errors import LocalProtocolError
from dlctl.wire import codec
from dlctl.wire.messages import (
    MESSAGES,
    NATURAL_MAX,
    Array,
    ChangeSettings,
    Dismiss,
    Json,
    Message,
    NumberRange,
    Packed,
    Parameters,
    Register,
)

NATURALS = st.integers(0, NATURAL_MAX)
ARRAYS = st.sampled_from(codec.DTYPES).flatmap(
    lambda dtype: st.binary(max_size=64).map(
        lambda raw: np.frombuffer(raw[: len(raw) // dtype.itemsize * dtype.itemsize], dtype)
    )
)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    str(str): st.text(max_size=100),
    str(bool): st.booleans(),
    str(bytes): st.binary(max_size=100),
    str(Json): st.dictionaries(st.text(max_size=8), JSONS, max_size=4),
    str(Array): ARRAYS,
    str(Packed): st.builds(Packed, st.text(max_size=10), NATURALS, st.tuples(ARRAYS, ARRAYS)),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """All that a field of this type may hold."""
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=5).map(tuple)
    limits = codec.limits_of(hint)
    return VALUES[str(hint)] if limits is None else numbers(limits)


def numbers(limits: NumberRange) -> st.SearchStrategy[float]:
    if isinstance(limits.least, int):
        return st.integers(limits.least, int(limits.most))
    return st.floats(
        None if limits.allows_nan else limits.least, None if limits.allows_nan else limits.most
    )


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, *(values(hints[f.name]) for f in fields(kind)))  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """A value that can be compared: arrays as (dtype, bytes), so that NaN equals NaN."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, Packed):
        return (value.kind, value.length, [plain(array) for array in value.arrays])
    return repr(value)


@pytest.mark.parametrize("kind", MESSAGES.values(), ids=lambda kind: kind.__name__)
def test_what_is_decoded_is_what_was_encoded(kind: type[Message]) -> None:
    @times(0.4)
    @given(messages(kind))
    def round_trip(message: Message) -> None:
        frames = [bytes(frame) for frame in codec.encode(message)]
        decoded = codec.decode(frames)
        assert type(decoded) is kind
        for field in fields(kind):  # type: ignore[arg-type]
            assert plain(getattr(decoded, field.name)) == plain(getattr(message, field.name))

    round_trip()


def test_arrays_are_not_copied_on_the_way_out() -> None:
    values = np.arange(1000, dtype=np.float32)
    frames = codec.encode(Parameters(0, 1, 2, 3, values))
    values[0] = 7
    assert np.frombuffer(frames[1], np.float32)[0] == 7


def test_arrays_are_read_only_views_on_the_way_in() -> None:
    frames = [bytes(f) for f in codec.encode(Parameters(0, 1, 2, 3, np.zeros(3, np.float32)))]
    decoded = codec.decode(frames)
    assert isinstance(decoded, Parameters)
    assert not decoded.values.flags.writeable
    assert np.shares_memory(decoded.values, np.frombuffer(frames[1], np.uint8)), "no copy"


def test_a_header_that_would_be_refused_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="Register"):
        codec.encode(Register("x" * codec.HEADER_BYTES_MAX, "worker", "worker-0", 1, 1, "h", "v"))


def test_text_that_is_no_unicode_arrives_in_a_readable_form() -> None:
    frames = codec.encode(Dismiss("a lone surrogate \udc80"))
    assert codec.decode([bytes(frames[0])]) == Dismiss("a lone surrogate \\udc80")


def test_what_msgpack_has_no_form_for_is_our_own_error() -> None:
    for value in (2**70, object(), {1, 2}):
        with pytest.raises(LocalProtocolError, match="ChangeSettings"):
            codec.encode(ChangeSettings(1, {"value": value}))


def test_only_flat_arrays_of_known_types_are_sent() -> None:
    for values in (np.zeros((2, 2), np.float32), np.zeros(2, ">f4"), np.zeros(2, complex)):
        with pytest.raises(LocalProtocolError, match="array"):
            codec.encode(Parameters(0, 1, 2, 3, values))


def test_a_message_shows_the_length_of_its_arrays_and_never_their_content() -> None:
    shown = repr(Parameters(0, 1, 2, 3, np.zeros(1000, np.float32)))
    assert "values=float32[1000]" in shown
    assert len(shown) < 140
