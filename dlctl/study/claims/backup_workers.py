"""A few backup workers make synchronous training faster; too many do not."""

from __future__ import annotations

from dlctl.study.claims import jobs
from dlctl.study.claims.base import (
    Arm,
    Evidence,
    Lab,
    PaperClaim,
    changes_of,
    costs,
    finals,
    less,
    within,
)  # fmt: skip

WORKERS = 10
BACKUPS = (0, 2, 8)
SPREAD = 0.7
GOOD = 0.85
TARGET = f"accuracy >= {GOOD}"
STEPS = 30
LOST = 0.02
TRIALS = 3


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(
        stop=f"steps = {WORKERS * STEPS}", workers=WORKERS, evaluation="every_steps = 20"
    )
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    begun = Arm(
        method="sync",
        changes={"optimizer": {"name": "sgd", "lr": 0.3}},
        conditions={"step_s": 0.01, "spread": SPREAD},
    )
    tuned = lab.tuned({"0 backup": begun}, TARGET, TRIALS)
    rate = tuned["0 backup"].changes["optimizer.lr"]
    arms = {
        f"{b} backup": begun.having(
            {
                "algorithm": {"name": "sync", "backup_workers": b},
                "optimizer": {"name": "sgd", "lr": rate * (WORKERS - b) / WORKERS},
            }
        )
        for b in BACKUPS
    }
    runs = lab.run(arms)
    most = WORKERS * STEPS * 0.01
    seconds = {name: costs(of_arm, "seconds", TARGET, most) for name, of_arm in runs.items()}
    accuracy = {name: finals(of_arm, "accuracy", 0.0) for name, of_arm in runs.items()}
    rates = {
        name: [0.0 if r is None else r.figures["step"] / r.figures["seconds"] for r in of_arm]
        for name, of_arm in runs.items()
    }
    few, none, many = (f"{b} backup" for b in (2, 0, BACKUPS[-1]))
    return Evidence(
        margins={
            "faster than none": less(seconds[few], seconds[none]),
            "faster than many": less(seconds[few], seconds[many]),
            "as accurate": within(less(accuracy[few], accuracy[none]), LOST),
        },
        figures={
            f"seconds to {GOOD:.0%}": seconds, "accuracy": accuracy, "used gradients/s": rates,
        },
        notes=changes_of(tuned, ["optimizer.lr"]),
    )  # fmt: skip


CLAIM = PaperClaim(
    paper="Chen et al., Revisiting Distributed Synchronous SGD, 2016",
    sentence="Not waiting for the slowest few workers makes synchronous SGD faster, without loss "
    "of accuracy; the best number of backup workers is neither none nor all.",
    setup=f"sync with {WORKERS} workers on the digits, {', '.join(map(str, BACKUPS))} of which are "
    f"backups; the standard deviation of the logarithm of a step's time is {SPREAD:g}. The rate is "
    f"tuned with {TRIALS} trials without backups, and is proportional to the gradients that a step "
    "uses.",
    measure=f"the time to an accuracy of {GOOD:g}, and the accuracy after {STEPS} steps' samples",
    criterion={
        "faster than none": "with 2 backups it is reached sooner than with none",
        "faster than many": f"and sooner than with {BACKUPS[-1]}",
        "as accurate": f"the accuracy at the end is at most {LOST:g} lower with 2 than with none",
    },
    experiment=experiment,
    minutes=1,
)
