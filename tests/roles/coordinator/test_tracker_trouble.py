"""What becomes of a tracker's failure: a problem, told once, that costs the run nothing."""

from __future__ import annotations

from training_coordinator import AtWork, events

from dlctl.problems import RUN
from dlctl.roles.protocol.effects import TrackerTrouble


def test_it_is_told_once_and_shown_as_long_as_it_lasts() -> None:
    run, told = AtWork(2), []
    for why, dropped in (("no such host", 0), ("no such host", 3), ("refused", 9), ("", 9)):
        effects = run.machine.handle(TrackerTrouble("wandb", why, dropped), run.now)
        told += events(effects, "tracker")
        problem = run.problems().get(RUN)
        if why:
            assert problem is not None
            assert problem["code"] == "tracker-failed"
            assert (problem["facts"]["why"], problem["facts"].get("dropped", 0)) == (why, dropped)
        else:
            assert problem is None
        run.wait(2.0)
    assert run.works
    assert len(told) == 2
    assert "no such host" in told[0]
    assert "9 rows" in told[1]
