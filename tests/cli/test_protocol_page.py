"""The page of `dlctl simulate --protocol` says only what the windows tell."""

from __future__ import annotations

from typing import Any

from dlctl.cli.ui import protocol_page
from dlctl.study import saturation

FIRST = {"kind": "link", "name": "server-0 in", "workers": 14.4}


def said(steps_per_s: float, share: float, *, is_whole: bool = True) -> str:
    busy = {"link": {"name": "server-0 in", "share": share}}
    row: dict[str, Any] = {"workers": 16, "busy": busy, "steps_per_s": steps_per_s}
    row |= {"is_whole": is_whole, "halves": [steps_per_s, 0.0]}
    return protocol_page._saturates(FIRST, [row])


def test_how_many_workers_saturate_it_is_not_said_where_no_window_tells() -> None:
    assert said(12.0, 0.5) == "a link first (server-0 in), at about 14 workers"
    assert said(12.0, 1.0) == "a link first (server-0 in), with 16 workers already"
    assert "--until" in said(0.0, 1.0)
    assert "--within" in said(12.0, 0.5, is_whole=False)


def test_the_error_of_a_window_that_was_cut_is_not_known() -> None:
    row = {"workers": 16, "is_whole": False, "steps_per_s": 12.0, "halves": [24.0, None]}
    data = {"windows": [row], "spread": saturation.spread(row), "error": None}
    assert "--within" in protocol_page._error(data)
    whole = row | {"is_whole": True, "halves": [12.0, 12.0]}
    assert "0 %" in protocol_page._error({**data, "spread": saturation.spread(whole)})
