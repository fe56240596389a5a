"""Every method has an oracle; and what compares them notices what is wrong, and tells how far."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracles
import pytest

from dlctl import registry

DECLARED = oracles.declared(Path(__file__).parents[1])


def test_every_method_has_an_oracle() -> None:
    """Tests of a method say so by their marker. A name that is none would leave another one out."""
    assert {each.method for each in DECLARED} == registry.BUILT_IN["algorithms"].keys()


def test_who_has_an_oracle_compares_with_it() -> None:
    assert [each.test for each in DECLARED if not each.compares] == []


def compared(method: str = "ssp", oracle: str = "a loop") -> tuple[oracles.Agree, SimpleNamespace]:
    """The fixture of a test with this marker, and the report of that test."""
    report = SimpleNamespace(user_properties=[])
    marker = SimpleNamespace(args=(method, oracle))
    node = SimpleNamespace(
        get_closest_marker={oracles.MARK: marker}.get, user_properties=report.user_properties
    )
    return oracles.Agree(node), report  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ours", "theirs", "bounds"),
    [
        ([1.0, 2.0], [1.0, 2.0], {}),
        ([1.0, 2.0], [1.0, 2.5], {"atol": 0.5}),
        ([1.0, -2.0], [1.0, -2.5], {"rtol": 0.2}),
        (np.float32(3), 3.5, {"rtol": 0.1, "atol": 0.2}),
    ],
)
def test_what_is_within_the_bounds_agrees(ours, theirs, bounds) -> None:
    agree, report = compared()
    agree(ours, theirs, **bounds)
    ((_, found),) = report.user_properties
    row = oracles.Row(*found)
    assert row[:2] == ("ssp", "a loop")
    assert row.difference == np.abs(np.subtract(ours, theirs)).max()
    assert row.part <= 1


@pytest.mark.parametrize(
    ("ours", "theirs", "bounds"),
    [
        ([1.0, 2.0], [1.0, np.nextafter(2.0, 3)], {}),
        ([1.0, 2.0], [1.0, 2.5], {"atol": 0.4}),
        ([1.0, 2.0], [1.0, 2.5], {"rtol": 0.1}),
        ([1.0, np.nan], [1.0, np.nan], {"atol": 1.0}),
        ([1.0, 1.0], 1.0, {}),
        ([], [], {}),
    ],
    ids=["a bit", "atol", "rtol", "no number", "another shape", "nothing"],
)
def test_what_is_not_does_not(ours, theirs, bounds) -> None:
    with pytest.raises(AssertionError, match="ssp"):
        compared()[0](ours, theirs, **bounds)


def test_the_table_has_the_worst_of_equal_comparisons_and_those_that_failed() -> None:
    first, report = compared("sync", "torch")
    first([1.0], [1.0], atol=1e-3)
    first([1.0], [1.0005], atol=1e-3)
    first([1.0], [1.0])
    other, failed = compared()
    with pytest.raises(AssertionError):
        other([1.0], [1.5], rtol=0.1)
    assert oracles.table([report, failed, report]) == [  # type: ignore[list-item]
        "method  oracle  max difference  asked          part of it",
        "ssp     a loop  5.0e-01         0.1 |x|        333%",
        "sync    torch   5.0e-04         0.001          50%",
        "sync    torch   0               the same bits",
    ]


def test_markers_are_found_wherever_they_are(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        '@pytest.mark.oracle("sync", "torch")\n'
        "def test_all(agree): ...\n"
        "\n"
        '@pytest.mark.parametrize("d", [pytest.param(1, marks=pytest.mark.oracle("ssp", "a"))])\n'
        "def test_one(d): ...\n"
    )
    assert oracles.declared(tmp_path) == [
        ("sync", "torch", "test_some.py:2", True),
        ("ssp", "a", "test_some.py:5", False),
    ]
