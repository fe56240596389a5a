"""L-BFGS gives the same parameters however many machines compute, and stragglers cost little."""

from __future__ import annotations

import numpy as np

from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, Ran, Row, within

ITERATIONS = 6
STEP_S = 0.04
ALIKE = 1e-3
SLOW = 10.0
WORKERS = 8
LOSS = 1.15


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(
        stop="epochs = 1000.0", workers=1, batch=48, portion=1, task="mlp.py:linear",
        evaluation="every_epochs = 0.0",
    )  # fmt: skip
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    alone = Arm(
        method="sandblaster",
        changes={"algorithm": {"name": "sandblaster", "iterations": ITERATIONS}},
        conditions={"step_s": STEP_S, "spread": 0.0},
    )
    more = alone.having({"workers.count": 4, "servers.count": 2})
    many = alone.having({"workers.count": WORKERS})
    arms = {
        "1 worker, 1 server": alone,
        "4 workers, 2 servers": more.under(spread=0.3),
        "4 workers, some are killed": more.under(kill_every_s={"worker": 1.0}),
        "8 equal workers": many,
        "8, one is slow": many.under(slow={"worker-3": SLOW}),
    }
    runs = lab.run(arms)
    first = runs["1 worker, 1 server"]
    apart = {name: _apart(first, runs[name]) for name in [*arms][1:3]}
    equal, slow = (_seconds(runs[name]) for name in [*arms][3:])
    ideal = WORKERS / (WORKERS - 1 + 1 / SLOW)
    times = [s / (e * ideal) for s, e in zip(slow, equal, strict=True)]
    killed = [ran.simulated["killed"] for ran in runs["4 workers, some are killed"] if ran]
    return Evidence(
        margins={
            "the same with more": within(apart["4 workers, 2 servers"], ALIKE),
            "the same with kills": within(apart["4 workers, some are killed"], ALIKE),
            "no tail": within(times, LOSS),
        },
        figures={
            "largest difference, relative to the largest parameter": apart,
            "time with a slow worker, relative to the ideal": {"8, one is slow": times},
        },
        notes=[f"workers killed, by seed: {', '.join(map(str, killed))}"],
    )


def _apart(first: list[Ran | None], second: list[Ran | None]) -> Row:
    """The largest difference of two parameters, relative to the largest one; 1 if a run failed."""
    return [
        1.0
        if a is None or b is None
        else float(np.abs(a.weights - b.weights).max() / np.abs(a.weights).max())
        for a, b in zip(first, second, strict=True)
    ]


def _seconds(runs: list[Ran | None]) -> Row:
    return [1e6 if run is None else run.figures["seconds"] for run in runs]


CLAIM = PaperClaim(
    paper="Dean et al., Large Scale Distributed Deep Networks, 2012",
    sentence="Sandblaster L-BFGS computes what one machine would, whatever the number of replicas "
    "and the failures among them, and copies of outstanding portions cut the tail.",
    setup=f"Softmax regression on all digits, {ITERATIONS} iterations of L-BFGS, with 1 worker; "
    "with 4 workers and 2 servers; with workers killed once a second on average; and with "
    f"{WORKERS} workers, one of which is {SLOW:g} times slower.",
    measure="the largest difference from the parameters of one worker, relative to the largest of "
    "them; and the time relative to the ideal, in which the slow worker does its share",
    criterion={
        "the same with more": f"the difference is at most {ALIKE:g} with more workers and servers",
        "the same with kills": f"and at most {ALIKE:g} when workers are killed",
        "no tail": f"the time is at most {LOSS:g} of the ideal",
    },
    experiment=experiment,
    remark="In one of the five seeds the run with kills failed, and counts as wholly different; "
    "the other four have the same parameters to the bit.",
    minutes=1,
)
