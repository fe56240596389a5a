"""What a reader gets to see of daemons fits into one message, whatever they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repeated import times

from dlctl import messages as m
from dlctl import wire
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.coordinator.requests import (
    ROW_BYTES,
    ROWS_MAX,
    RUN_BYTES,
    TEXT_BYTES_MAX,
    shortened,
)

LONG = "\u2603" * 30_000
DEEP: Any = 1.0
for _ in range(6):
    DEEP = [DEEP]
METRICS: list[dict[str, Any]] = [
    {f"metric {n}": float(n) for n in range(1000)},
    {f"{n} {LONG}": {LONG: [LONG] * 4} for n in range(50)},
    {"deep": DEEP, "flat": 1},
    {"list": list(range(4000)), "wide": [[0.5] * 63] * 60},
    {"list": [0.0] * 924},
    {"text": LONG, "nothing": None, "yes": True},
]


def row(metrics: dict[str, Any], text: str = "") -> dict[str, Any]:
    """A daemon as `status` shows it."""
    daemon = Daemon("worker-0", "worker", 0)
    daemon.begin(1.0)
    daemon.phase = daemon.waiting_for = daemon.host = daemon.error = text
    daemon.last_exit = {"code": 1, "text": text, "at": 1.0, "last_lines": [text]}
    daemon.metrics = metrics
    return daemon.to_json()


def arrives(rows: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """What a client reads of an answer."""
    daemons = [shortened(row, ROW_BYTES) for row in rows]
    result = {"now": 1.0, "run": shortened(run, RUN_BYTES), "daemons": daemons, "of": len(rows)}
    read = wire.decode(wire.encode(m.Reply(2**52, True, "", result)))
    assert isinstance(read, m.Reply)
    return read.result


@pytest.mark.parametrize("metrics", METRICS, ids=lambda metrics: next(iter(metrics))[:9])
def test_an_answer_about_daemons_that_report_too_much_can_be_read(metrics: dict[str, Any]) -> None:
    absurd = row(metrics, LONG)
    settings = {"settings": {f"worker-{n}": {"push": 5e6, "fetch": LONG} for n in range(2000)}}
    read = arrives([absurd] * ROWS_MAX, absurd | settings)
    for shown in read["daemons"]:
        assert shown.keys() == absurd.keys(), "what it is itself is always told"
        assert "last_lines" not in shown["last_exit"]


def test_what_is_not_too_much_comes_whole() -> None:
    metrics = {"step": 7, "loss": 0.5, "settings": {"push": None}, "poison": {"worker-1": 2}}
    plain = row(metrics | {f"metric {n}": n / 7 for n in range(60)}, "all is well")
    (shown,) = arrives([plain], plain)["daemons"]
    del plain["last_exit"]["last_lines"]
    assert shown == plain


def test_texts_are_cut_to_whole_characters() -> None:
    assert shortened(LONG, ROW_BYTES) == "\u2603" * (TEXT_BYTES_MAX // 3)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=60,
)


@pytest.mark.long
@times(0.2)
@given(st.dictionaries(st.text(), ANY))
def test_any_report_fits_beside_others(metrics: dict[str, Any]) -> None:
    rows = [row(metrics | {"more": metrics}, LONG)] * ROWS_MAX
    assert len(arrives(rows, {})["daemons"]) == ROWS_MAX
