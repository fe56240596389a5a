"""The page of `dlctl simulate --protocol` says only what the windows tell."""

from __future__ import annotations

from typing import Any

from dlctl.cli.ui import protocol_page

FIRST = {"kind": "link", "name": "server-0 in", "workers": 14.4}


def said(steps_per_s: float, share: float) -> str:
    busy = {"link": {"name": "server-0 in", "share": share}}
    row: dict[str, Any] = {"workers": 16, "busy": busy, "steps_per_s": steps_per_s}
    return protocol_page._saturates(FIRST, [row])


def test_how_many_workers_saturate_it_is_not_said_where_no_window_tells() -> None:
    assert said(12.0, 0.5) == "a link first (server-0 in), at about 14 workers"
    assert said(12.0, 1.0) == "a link first (server-0 in), with 16 workers already"
    assert said(0.0, 1.0).startswith("not known: the window of 16 workers ended before any step")
