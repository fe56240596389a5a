"""Servers spread over the workers load all links alike, and change nothing in the result."""

from __future__ import annotations

import numpy as np

from dlctl.sim.request import LinkSpeed
from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, Ran, Row, less, within

HOSTS, STEPS = 6, 12
EVEN = 1.1


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(
        stop=f"steps = {HOSTS * STEPS}", workers=HOSTS, evaluation="every_epochs = 0.0"
    )
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    conditions = {"step_s": 0.001, "link": LinkSpeed(bytes_per_s=12.5e6, latency_s=0.0005)}
    arms = {
        name: Arm(
            method="sync",
            changes={
                "hosts": [{"ssh": f"h{n}"} for n in range(HOSTS)],
                "servers": servers,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
            conditions=conditions,
        )
        for name, servers in (
            ("servers beside workers", {"placement": "workers"}),
            ("one server", {"count": 1}),
        )
    }
    runs = lab.run(arms)
    uneven = {name: [_fullest(run) for run in of_arm] for name, of_arm in runs.items()}
    seconds = {
        name: [1e6 if run is None else run.figures["seconds"] for run in of_arm]
        for name, of_arm in runs.items()
    }
    beside, central = arms
    apart = _apart(runs[beside], runs[central])
    return Evidence(
        margins={
            "links alike": within(uneven[beside], EVEN),
            "faster": less(seconds[beside], seconds[central]),
            "the same model": within(apart, 1e-6),
        },
        figures={"bytes of the fullest link, relative to the mean": uneven, "seconds": seconds},
    )


def _fullest(run: Ran | None) -> float:
    if run is None:
        return float(HOSTS)
    sums = [row["out_bytes"] + row["in_bytes"] for row in run.figures["links"].values()]
    return float(max(sums) / np.mean(sums))


def _apart(first: list[Ran | None], second: list[Ran | None]) -> Row:
    return [
        1.0 if a is None or b is None else float(np.abs(a.weights - b.weights).max())
        for a, b in zip(first, second, strict=True)
    ]


CLAIM = PaperClaim(
    paper="Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training in "
    "Heterogeneous GPU/CPU Clusters, 2020",
    sentence="Parameter servers on all machines balance the load of their links, where one central "
    "server is a bottleneck.",
    setup=f"sync on the digits with one worker on each of {HOSTS} hosts behind 100 Mbit/s, and a "
    f"server on each or one on the first; {STEPS} steps.",
    measure="the bytes of the fullest link relative to the mean of all, the time, and the "
    "parameters",
    criterion={
        "links alike": f"with servers on all hosts the fullest is at most {EVEN:g} of the mean",
        "faster": "it takes less time than with one server",
        "the same model": "the parameters differ by at most 1e-6",
    },
    experiment=experiment,
    minutes=1,
)
