"""One replica trains alone first, and the run does not diverge when the others begin."""

from __future__ import annotations

from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, Ran

WORKERS, STEPS, ALONE = 12, 10, 20
RATE = 0.3
GROUP = 4
"""Seeds of which one rate of divergence is made."""
BAD = 0.5


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(stop=f"steps = {WORKERS * STEPS + ALONE}", workers=WORKERS, task="mlp.py:two")
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    arms = {
        name: Arm(
            method="downpour",
            changes={
                "inner": {"name": "none"},
                "optimizer": {"name": "adagrad", "lr": RATE},
                "algorithm": {"name": "downpour", "warmstart_steps": alone},
            },
            conditions={"step_s": 0.01, "spread": 0.3},
        )
        for name, alone in (("without", 0), ("with", ALONE))
    }
    runs = lab.run(arms)
    rates = {name: _rates(of_arm) for name, of_arm in runs.items()}
    return Evidence(
        margins={
            "diverges less": [a - b for a, b in zip(rates["without"], rates["with"], strict=True)]
        },
        figures={f"share of diverged runs, groups of {GROUP} seeds": rates},
        notes=[
            f"{name}: {sum(map(_is_bad, of_arm))} of {len(of_arm)} seeds have diverged"
            for name, of_arm in runs.items()
        ],
    )


def _is_bad(run: Ran | None) -> bool:
    return run is None or run.figures["evaluation"] is None or not run.final("accuracy") >= BAD


def _rates(runs: list[Ran | None]) -> list[float]:
    groups = [runs[n : n + GROUP] for n in range(0, len(runs), GROUP)]
    return [sum(map(_is_bad, group)) / len(group) for group in groups]


CLAIM = PaperClaim(
    paper="Dean et al., Large Scale Distributed Deep Networks, 2012",
    sentence="Training one replica alone at first virtually eliminates the divergence of "
    "asynchronous runs with Adagrad.",
    setup=f"Downpour on the digits, two hidden layers, {WORKERS} replicas, Adagrad with the "
    f"aggressive rate {RATE:g}, with and without {ALONE} steps of one replica alone; the same "
    "number of steps in all.",
    measure=f"the share of runs with an accuracy below {BAD:g} at the end, in five groups of "
    f"{GROUP} seeds",
    criterion={"diverges less": "the share is smaller with the warm start"},
    experiment=experiment,
    remark="With this rate and in so few steps nearly all runs end badly, with the warm start and "
    "without it. It says nothing about smaller rates or longer runs.",
    seeds=5 * GROUP,
    minutes=1,
)
