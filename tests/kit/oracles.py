"""Oracles: where a method ends, and where a loop of its paper, torch, scipy or another method does.

A test that compares the two says so with `@pytest.mark.oracle(method, oracle)`, and compares them
with the fixture `agree`. `make oracles` runs just these tests, and prints how far apart they were.
"""

from __future__ import annotations

import ast
import importlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

REQUIRED = "DLCTL_ORACLES"
"""Set by `make oracles`: a package that is missing there is an error."""
MARK = "oracle"
"""The marker, and the name under which what was found travels in the reports of tests."""


class Row(NamedTuple):
    """One comparison, or the worst of several."""

    method: str
    oracle: str
    difference: float
    """The largest of all elements."""
    asked: str
    """What it may be."""
    part: float
    """How much of that it is, for the element that is nearest to its bound; 1: all."""


def asked_of(atol: float, rtol: float) -> str:
    bounds = [f"{atol:g}"] if atol else []
    bounds += [f"{rtol:g} |x|"] if rtol else []
    return " + ".join(bounds) or "the same bits"


class Agree:
    """Compares for one test, and keeps what it has found in the report of that test."""

    def __init__(self, node: pytest.Item) -> None:
        marker = node.get_closest_marker(MARK)
        assert marker is not None, f"{node.nodeid} has no marker that names its method and oracle"
        self.method, self.oracle = marker.args
        self._found = node.user_properties

    def __call__(self, ours: Any, theirs: Any, *, atol: float = 0.0, rtol: float = 0.0) -> None:
        """Arrays or numbers of one shape; |ours - theirs| <= atol + rtol |theirs|, in float64. With
        neither they are equal. Raises AssertionError.
        """
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert ours.shape == theirs.shape, f"{self.method}: {ours.shape} and {theirs.shape}"
        assert ours.size, f"{self.method}: nothing to compare"
        apart = np.abs(ours - theirs)
        bound = atol + rtol * np.abs(theirs)
        part = np.divide(apart, bound, out=np.where(apart, np.inf, 0.0), where=bound > 0)
        row = Row(
            self.method, self.oracle, float(apart.max()), asked_of(atol, rtol), float(part.max())
        )
        self._found.append((MARK, list(row)))
        what = f"{self.method} and its oracle, {self.oracle}"
        np.testing.assert_allclose(
            ours, theirs, rtol=rtol, atol=atol, equal_nan=False, err_msg=what
        )


def table(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Lines, sorted by method: of equal oracles and bounds the one that has come nearest."""
    worst: dict[tuple[str, str, str], Row] = {}
    for report in reports:
        for name, values in report.user_properties:
            if name == MARK:
                row = Row(*values)
                before = worst.setdefault((row.method, row.oracle, row.asked), row)
                worst[row.method, row.oracle, row.asked] = before._replace(
                    difference=max(before.difference, row.difference),
                    part=max(before.part, row.part),
                )
    rows = [("method", "oracle", "max difference", "asked", "part of it")]
    for _, row in sorted(worst.items()):
        part = f"{row.part:.0%}" if row.asked != asked_of(0, 0) else ""
        rows.append(
            (
                row.method,
                row.oracle,
                f"{row.difference:.1e}" if row.difference else "0",
                row.asked,
                part,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class Declared(NamedTuple):
    """A marker in a file of tests."""

    method: str
    oracle: str
    test: str
    """file:line, of the function."""
    compares: bool
    """Whether the test asks for the fixture."""


def declared(directory: Path) -> list[Declared]:
    """All markers in the files of tests below `directory`; no test is imported."""
    found = []
    for path in sorted(directory.rglob("test_*.py")):
        if f"mark.{MARK}(" not in (text := path.read_text()):
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                arguments = {argument.arg for argument in function.args.args}
                test = f"{path.relative_to(directory)}:{function.lineno}"
                for marker in _markers(function):
                    found.append(Declared(*marker, test, "agree" in arguments))
    return found


def _markers(function: ast.FunctionDef) -> Iterable[tuple[str, str]]:
    """(method, oracle) of each, those of single parameters, too."""
    for decorator in function.decorator_list:
        for call in ast.walk(decorator):
            is_call = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            if is_call and call.func.attr == MARK:
                method, oracle = map(ast.literal_eval, call.args)
                yield method, oracle


def package(name: str) -> Any:
    """A package whose results are an oracle. The tests of its module are skipped without it, but in
    `make oracles`, which has installed it.
    """
    if os.environ.get(REQUIRED):
        with warnings.catch_warnings(action="ignore"):  # Its imports are its own affair.
            return importlib.import_module(name)
    return pytest.importorskip(name, reason="it is not installed: `make oracles` installs it")
