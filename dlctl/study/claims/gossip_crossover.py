"""Few workers are faster without waiting; many train better with all-reduce."""

from __future__ import annotations

from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, changes_of, costs, finals, less

FEW, MANY = 4, 24
BATCHES = 240
SPREAD = 0.7
GOOD = 0.8
TARGET = f"accuracy >= {GOOD}"
TRIALS = 3


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(stop=f"steps = {BATCHES}", workers=FEW, evaluation="every_steps = 24")
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    begun = {
        f"{name}, {count}": Arm(
            method=name,
            changes={"workers.count": count, "inner": {"name": "sgd", "lr": 0.1}},
            conditions={"step_s": 0.01, "spread": SPREAD},
        )
        for count in (FEW, MANY)
        for name in ("gossip", "allreduce")
    }
    arms = lab.tuned(begun, TARGET, TRIALS)
    runs = lab.run(arms)
    never = BATCHES * 0.01
    seconds = {n: costs(of_arm, "seconds", TARGET, never) for n, of_arm in runs.items()}
    accuracy = {n: finals(of_arm, "accuracy", 0.0) for n, of_arm in runs.items()}
    gossip, summed = (f"{name}, {MANY}" for name in ("gossip", "allreduce"))
    early, late = (f"{name}, {FEW}" for name in ("gossip", "allreduce"))
    return Evidence(
        margins={
            "few: gossip is sooner": less(seconds[early], seconds[late]),
            "many: all-reduce is better": less(accuracy[gossip], accuracy[summed]),
        },
        figures={f"seconds to {GOOD:.0%}": seconds, "accuracy at the end": accuracy},
        notes=changes_of(arms, ["inner.lr"]),
    )


CLAIM = PaperClaim(
    paper="Jin et al., How to scale distributed deep learning?, 2016",
    sentence="With few workers asynchronous methods such as gossip converge faster; with many, "
    "synchronous all-reduce ends with the better model.",
    setup=f"gossip and allreduce on the digits with {FEW} and {MANY} workers, {BATCHES} batches in "
    f"all; the standard deviation of the logarithm of a step's time is {SPREAD:g}. Each is tuned "
    f"with {TRIALS} trials.",
    measure=f"the time to an accuracy of {GOOD:g}, and the accuracy at the end",
    criterion={
        "few: gossip is sooner": f"with {FEW} workers gossip reaches it sooner",
        "many: all-reduce is better": f"with {MANY} workers all-reduce has the higher accuracy",
    },
    experiment=experiment,
    minutes=1,
)
