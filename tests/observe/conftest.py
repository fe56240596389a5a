"""Runs whose history is known: rows as a coordinator writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recorded import START, row

from dlctl.records.evaluated import Result
from dlctl.records.series import EVALUATION


@pytest.fixture
def trained(run_directory: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a run that was at step 10, 20 ... after each second; `rows` takes the place of that."""

    def make(run_id: str = "digits-7f3a", rows: Any = None, **run: Any) -> Any:
        made = run_directory(run_id)
        for one in rows or [row(second, second * 10) for second in range(11)]:
            made.db.add_metric(*one)
        made.db.add_metric(START + 5.5, EVALUATION, 45, Result(45, {"accuracy": 0.5}).to_json())
        made.db.add_metric(START + 4, "worker-0", 40, {"samples_per_s": 50.0})
        made.event(START + 5, "exit", "worker-1", "exit 1")
        made.run(step=100, samples=1000, **run)
        return made

    return make
