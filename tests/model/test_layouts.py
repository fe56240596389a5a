"""In what two models differ."""

from __future__ import annotations

from dlctl.model.flat import NAMED_MAX, TRAINED, Layout, TensorEntry


def _layout(**tensors: tuple[tuple[int, ...], str]) -> Layout:
    return Layout(
        tuple(TensorEntry(name, TRAINED, shape, dtype) for name, (shape, dtype) in tensors.items())
    )


def test_all_tensors_that_differ_are_named_with_both_shapes_and_dtypes() -> None:
    before = _layout(
        same=((2,), "float32"), shape=((3, 4), "float32"), dtype=((5,), "float32"),
        gone=((6,), "float32"),
    )  # fmt: skip
    now = _layout(
        same=((2,), "float32"), shape=((4, 3), "float32"), dtype=((5,), "bfloat16"),
        added=((7,), "float32"),
    )  # fmt: skip
    assert now.difference(before).split("; ") == [
        '"shape" is float32[4, 3], was float32[3, 4]',
        '"dtype" is bfloat16[5], was float32[5]',
        '"gone" is missing, was float32[6]',
        '"added" is float32[7], was missing',
    ]


def test_of_many_tensors_the_first_are_named_and_the_others_counted() -> None:
    before = _layout(**{f"layer.{n}": ((3,), "float32") for n in range(NAMED_MAX + 7)})
    now = _layout(**{f"layer.{n}": ((4,), "float32") for n in range(NAMED_MAX + 7)})
    *named, more = now.difference(before).split("; ")
    assert len(named) == NAMED_MAX
    assert "7" in more


def test_another_order_is_a_difference() -> None:
    one, two = ((1,), "float32"), ((2,), "float32")
    assert "order" in _layout(a=one, b=two).difference(_layout(b=two, a=one))
