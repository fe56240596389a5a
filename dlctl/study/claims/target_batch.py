"""Peers that come and go train as a fixed fleet does, if a step is of so many samples."""

from __future__ import annotations

from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, Row, finals, within

WORKERS, TARGET, STEPS = 8, 256, 30
ALIKE = 0.02
SLOWER = 2.0


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(
        stop=f"samples = {TARGET * STEPS}",
        workers=WORKERS,
        portion=2,
        evaluation="every_steps = 80",
    )
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    fixed = Arm(
        method="target-batch",
        changes={
            "algorithm": {"name": "target-batch", "target_samples": TARGET},
            "optimizer": {"name": "sgd", "lr": 0.3},
            "workers.restarts_max": 1000,
        },
        conditions={"step_s": 0.2, "spread": 0.3},
    )
    arms = {"fixed fleet": fixed, "workers come and go": fixed.under(kill_every_s={"worker": 5.0})}
    runs = lab.run(arms)
    accuracy = {name: finals(of_arm, "accuracy", 0.0) for name, of_arm in runs.items()}
    loss = {name: finals(of_arm, "test_loss", 10.0) for name, of_arm in runs.items()}
    seconds = {
        name: [1e6 if run is None else float(run.figures["seconds"]) for run in of_arm]
        for name, of_arm in runs.items()
    }
    (fixed_ones, churned) = accuracy.values()
    apart: Row = [abs(a - b) for a, b in zip(fixed_ones, churned, strict=True)]
    slower = [b / a for a, b in zip(*seconds.values(), strict=True)]
    killed = [run.simulated["killed"] for run in runs["workers come and go"] if run]
    return Evidence(
        margins={
            "as a fixed fleet": within(apart, ALIKE),
            "goes on": within(slower, SLOWER),
        },
        figures={"accuracy": accuracy, "test loss": loss, "seconds": seconds},
        notes=[f"workers killed, by seed: {', '.join(map(str, killed))}"],
    )


CLAIM = PaperClaim(
    paper="Diskin et al., Distributed Deep Learning in Open Collaborations, 2021",
    sentence="If a step is made of a fixed number of samples, whoever computes them, training with "
    "peers that come and go is equivalent to training with a fixed fleet.",
    setup=f"target-batch with {WORKERS} workers on the digits, {STEPS} steps of {TARGET} samples, "
    "with and without a worker killed every five seconds on average, and replaced.",
    measure="the accuracy after the same samples, and the time",
    criterion={
        "as a fixed fleet": f"the accuracies differ by at most {ALIKE:g}",
        "goes on": f"it takes at most {SLOWER:g} times as long",
    },
    experiment=experiment,
    minutes=1,
)
