"""A bound on staleness holds always, and takes a time between that of none and of no bound."""

from __future__ import annotations

from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, Ran, less, within

WORKERS, STEPS = 8, 30
BOUNDS = {"s = 0": 0, "s = 3": 3, "no bound": 1_000_000}
SPREAD = 0.8


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(
        stop=f"steps = {WORKERS * STEPS}", workers=WORKERS, evaluation="every_epochs = 0.0"
    )
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    arms = {
        name: Arm(
            method="ssp",
            changes={
                "algorithm": {"name": "ssp", "staleness": bound}, "inner.lr": 0.03,
            },
            conditions={"step_s": 0.01, "spread": SPREAD},
        )
        for name, bound in BOUNDS.items()
    }  # fmt: skip
    runs = lab.run(arms)
    seconds = {name: [_of(run, "seconds") for run in of_arm] for name, of_arm in runs.items()}
    gaps = {
        name: [1e6 if run is None else float(run.simulated["clock_gap"]) for run in of_arm]
        for name, of_arm in runs.items()
    }
    return Evidence(
        margins={
            "never further apart": within(gaps["s = 3"], BOUNDS["s = 3"] + 0.5),
            "faster than s = 0": less(seconds["s = 3"], seconds["s = 0"]),
            "slower than no bound": less(seconds["no bound"], seconds["s = 3"]),
        },
        figures={"seconds": seconds, "largest gap of two clocks": gaps},
    )


def _of(run: Ran | None, name: str) -> float:
    return 1e6 if run is None else float(run.figures[name])


CLAIM = PaperClaim(
    paper="Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter "
    "Server, 2013",
    sentence="No worker is ever more than s clocks ahead of the slowest, and the waiting is "
    "between that of bulk-synchronous and of asynchronous training.",
    setup=f"ssp with {WORKERS} workers on the digits, {STEPS} steps each on average, whose "
    f"durations vary: the standard deviation of their logarithm is {SPREAD:g}.",
    measure="the largest gap of two workers' clocks that the simulator has seen, and the time of "
    "the same number of steps",
    criterion={
        "never further apart": "with s = 3 the largest gap is at most 3",
        "faster than s = 0": "s = 3 takes less time than s = 0",
        "slower than no bound": "and more than without a bound",
    },
    experiment=experiment,
    remark="The gap of 3 with s = 0 is of the end of the runs of this record: it counted workers "
    "that had no data any more, for which nobody waits. It does not since.",
    figure="seconds",
    minutes=1,
)
