"""Delays cost more batches the deeper the network, and most with momentum."""

from __future__ import annotations

from dlctl.study.claims.base import Evidence, Lab, PaperClaim, less

DELAY = 32
WORKERS = 8
ROUNDS = 330
"""To the target without delay: ten times the longest delay, so that delay itself is little of it.
"""
TIMES_MAX = 10.0
ARMS = {"sgd": "SGD", "momentum": "momentum", "adagrad": "Adagrad"}


def ratios(lab: Lab, optimizer: str, hidden: int, delays: list[int]) -> dict[int, list[float]]:
    """Delay -> rounds to the target, relative to those without delay, for each seed. A run that
    does not reach it counts with `TIMES_MAX`.
    """
    answer = lab.loop(
        "delays",
        {
            "optimizer": optimizer, "hidden": hidden, "delays": [0, *delays],
            "workers": WORKERS, "rounds": ROUNDS, "times_max": TIMES_MAX,
            "seeds": [*lab.seeds],
        },
    )  # fmt: skip
    rounds = {int(delay): row for delay, row in answer["rounds"].items()}
    return {d: [a / b for a, b in zip(rounds[d], rounds[0], strict=True)] for d in delays}


def experiment(lab: Lab) -> Evidence:
    lab.place("digits")
    found = {
        (name, hidden): ratios(lab, name, hidden, [DELAY])[DELAY]
        for name in ARMS
        for hidden in (1, 3)
    }
    deep = {name: found[name, 3] for name in ARMS}
    return Evidence(
        margins={
            "deeper, SGD": less(found["sgd", 1], deep["sgd"]),
            "deeper, momentum": less(found["momentum", 1], deep["momentum"]),
            "momentum most": less(deep["sgd"], deep["momentum"]),
            "Adagrad less": less(deep["adagrad"], deep["momentum"]),
        },
        figures={
            f"rounds to the target, relative to s = 0, with s = {DELAY}": {
                f"{ARMS[name]}, {hidden} hidden": row for (name, hidden), row in found.items()
            }
        },
    )


CLAIM = PaperClaim(
    paper="Dai et al., Toward Understanding the Impact of Staleness in Distributed Machine "
    "Learning, 2018",
    sentence="Stale updates cost batches: more of them in deeper networks, and with momentum more "
    "than with plain SGD or Adagrad.",
    setup=f"{WORKERS} workers on the digits, each with its own optimiser of [inner] and a copy of "
    "the model. An update of one reaches another after 1 + r rounds, r uniform in 0 .. s. Layers "
    f"are 32 wide. Each rate is the one with which {ROUNDS} rounds without delay reach the "
    "target, 90 % of the test scans.",
    measure=f"rounds to the target with s = {DELAY}, relative to those with s = 0; {TIMES_MAX:g} "
    "where it is not reached in as many",
    criterion={
        "deeper, SGD": "three hidden layers need more than one, with SGD",
        "deeper, momentum": "and with momentum",
        "momentum most": "momentum needs more than SGD, with three",
        "Adagrad less": "Adagrad needs fewer than momentum, with three",
    },
    experiment=experiment,
    minutes=2,
)
