"""What the coordinator says of the mirror, and when its end waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from dlctl.problems import read
from dlctl.roles.coordinator.checkpoint_mirror import BEHIND_S, LASTING, CheckpointMirror
from dlctl.roles.coordinator.records import AddEvent, EventContext, MirrorCheckpoint
from dlctl.roles.protocol.effects import MirrorNews
from dlctl.stores import objects

ADDRESS = "s3://bucket/x"


class Mirror:
    def __init__(self, address: str = ADDRESS) -> None:
        self.context = EventContext(1.0)
        self.newest: dict[str, Any] = {"number": 3, "step": 30, "error": ""}
        self.asked: int | None = None
        """What the process knows of; None: all."""
        self.machine = CheckpointMirror(self.context, address, lambda: self.newest)

    def saved(self, number: int, now: float, error: str = "") -> list[Any]:
        self.newest = {"number": number, "step": 10 * number, "error": error}
        self.machine.on_checkpoint(self.newest, now)
        return self.context.clear()

    def news(
        self, number: int, now: float, pending: bool = False, why: str = "", cause: str = ""
    ) -> list[Any]:
        row = {"number": number, "step": 10 * number, "nbytes": 5} if number else {}
        asked = self.newest["number"] if self.asked is None else self.asked
        self.machine.on_news(MirrorNews(row, 2.0, asked, pending, (1, 5), why, cause), now)
        return self.context.clear()

    def codes(self, now: float) -> list[str]:
        found = list(self.machine.problems(now))
        assert read([problem.to_json() for problem in found]) == found
        return [problem.code for problem in found]


def test_each_complete_checkpoint_is_uploaded_and_a_failed_one_is_not() -> None:
    mirror = Mirror()
    assert mirror.saved(3, 1.0) == [MirrorCheckpoint(3)]
    assert mirror.saved(4, 2.0, error="server-0: full") == []
    assert Mirror("").saved(3, 1.0) == []
    assert Mirror("").machine.to_json() is None


def test_status_says_what_is_there_and_how_far_it_is_behind() -> None:
    mirror = Mirror()
    mirror.saved(3, 10.0)
    row = mirror.machine.to_json()
    assert row is not None
    assert (row["step"], row["pending"], row["lag_steps"]) == (None, True, None)
    mirror.news(2, 11.0, pending=True)
    row = mirror.machine.to_json()
    assert row is not None
    assert (row["step"], row["at"], row["lag_steps"], row["sent_bytes"]) == (20, 9.0, 10, 1)
    mirror.news(3, 12.0)
    row = mirror.machine.to_json()
    assert row is not None
    assert (row["pending"], row["lag_steps"], "behind_since" in row) == (False, 0, False)


def test_it_is_behind_if_none_gets_there_for_long_and_not_while_some_do() -> None:
    mirror = Mirror()
    mirror.saved(3, 0.0)
    assert mirror.codes(BEHIND_S - 1) == []
    mirror.news(2, BEHIND_S - 1, pending=True)
    assert mirror.codes(BEHIND_S + 1) == []
    assert mirror.codes(2 * BEHIND_S) == ["mirror-behind"]
    mirror.news(3, 2 * BEHIND_S)
    assert mirror.codes(2 * BEHIND_S) == []


@pytest.mark.parametrize(
    ("cause", "code"),
    [("throttled", "mirror-behind"), ("unreachable", "mirror-behind"), ("other", "mirror-behind"),
     ("expired", "mirror-refused"), ("foreign", "mirror-refused")],
)  # fmt: skip
def test_a_failure_is_a_problem_and_one_event_until_it_is_over(cause: str, code: str) -> None:
    mirror = Mirror()
    mirror.saved(3, 0.0)
    said = mirror.news(0, 1.0, pending=True, why="no", cause=cause)
    assert [e.data["code"] for e in said if isinstance(e, AddEvent)] == [code]
    assert mirror.codes(2.0) == [code]
    assert not any(isinstance(e, AddEvent) for e in mirror.news(0, 3.0, True, "no!", cause))
    over = mirror.news(3, 4.0)
    assert len([e for e in over if isinstance(e, AddEvent)]) == 1
    assert mirror.codes(5.0) == []


def test_the_end_waits_for_what_is_under_way_by_its_address() -> None:
    mirror = Mirror()
    assert mirror.machine.waits_for() != [], "an earlier coordinator may have left something"
    mirror.news(0, 0.0)
    assert mirror.machine.waits_for() == []
    mirror.saved(3, 0.0)
    mirror.asked = 2
    mirror.news(2, 0.5)
    assert mirror.machine.waits_for() != [], "that news was older than the checkpoint"
    mirror.asked = 3
    (what,) = mirror.machine.waits_for()
    assert ADDRESS in what
    mirror.news(3, 1.0)
    assert mirror.machine.waits_for() == []


def test_an_end_that_has_waited_long_enough_leaves_a_problem() -> None:
    mirror = Mirror()
    mirror.news(2, 0.0)
    mirror.saved(3, 1.0)
    assert mirror.codes(2.0) == []
    mirror.machine.give_up()
    assert mirror.codes(2.0) == ["mirror-behind"]
    mirror.news(3, 3.0)
    assert mirror.codes(4.0) == []


def test_a_run_without_a_mirror_waits_for_none() -> None:
    assert Mirror("").machine.waits_for() == []


def test_causes_are_those_of_stores() -> None:
    """The role may not import what opens files."""
    assert LASTING == objects.LASTING
