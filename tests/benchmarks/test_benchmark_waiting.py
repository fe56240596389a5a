"""`waiting` compares steps with pushes and steps without: there must have been both."""

from __future__ import annotations

import json
from typing import cast

import pytest

from benchmarks import waiting
from benchmarks.sandbox import Dlctl


@pytest.mark.parametrize(
    ("steps", "pushes", "says"),
    [
        ([10, 20, 20, 20, 20, 30], [5, 9, 9, 9, 9, 9], ""),
        ([10, 10, 10, 10, 10, 20], [5, 9, 9, 9, 9, 9], "worker-0 has made no step"),
        ([10, 20, 20, 20, 20, 20], [5, 9, 9, 9, 9, 9], "worker-0 has made no step"),
        ([10, 20, 20, 20, 20, 30], [5, 5, 5, 5, 5, 5], "nothing was pushed"),
        ([10, 20, 20, 20, 20, 30], [5, 9, 9, 9, 9, 10], "1 pushes after they were disabled"),
    ],
)
def test_a_step_with_pushes_is_compared_with_one_without_if_there_are_both(
    steps: list[int], pushes: list[int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks, then two that find the server quiet, and two more."""
    monkeypatch.setattr(waiting, "LOOK_S", 0.0)
    looks = enumerate(zip(steps, pushes, strict=True))

    def dlctl(command: str, *_: str) -> str:
        if command == "set":
            return ""
        second, (made, applied) = next(looks)
        worker = {"role": "worker", "metrics": {"step": made, "wait_share": 0.05}}
        server = {"role": "server", "name": "server-0", "metrics": {"pushes": applied}}
        rows = [server, *(worker | {"name": f"worker-{i}"} for i in range(2))]
        at = {"updated_at": f"2026-01-01T00:00:{second:02}Z"}
        return json.dumps({"daemons": [row | at for row in rows]})

    if says:
        with pytest.raises(RuntimeError, match=f"waiting: {says}"):
            waiting._with_and_without(cast("Dlctl", dlctl), 0.0)
        return
    both, none = waiting._with_and_without(cast("Dlctl", dlctl), 0.0)
    assert (both.step_s, both.wait_share, both.pushes) == (0.1, 0.05, 4)
    assert (none.step_s, none.pushes) == (0.1, 0)
