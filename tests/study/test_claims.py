"""Claims of papers: what each states, and that its criterion judges results as it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlctl.cli import app
from dlctl.errors import NotFound
from dlctl.ops import claims
from dlctl.study.claims import CLAIMS, load
from dlctl.study.claims.base import (
    Arm,
    ClaimOutcome,
    Evidence,
    Lab,
    PaperClaim,
    Ran,
    finals,
    judged,
    outcome,
    within,
)  # fmt: skip

ROOT = Path(__file__).parents[2]
Json = dict[str, Any]
SEED_NOISE = 1e-4


@pytest.mark.parametrize(
    ("margins", "expected"),
    [
        ([1.0, 1.1, 1.2, 1.1, -0.1], ClaimOutcome.SHOWN),
        ([1.0, 1.1, 1.2, -0.1, -0.1], ClaimOutcome.NOT_SHOWN),  # Three of five seeds.
        (
            [0.1, 3.0, 0.2, 5.0, 0.3],
            ClaimOutcome.NOT_SHOWN,
        ),  # The spread is larger than the median.
        ([-1.0, -1.1, -1.2, -1.1, 0.1], ClaimOutcome.REFUTED),
        ([0.0] * 5, ClaimOutcome.NOT_SHOWN),
        ([1.0] * 4, ClaimOutcome.NOT_SHOWN),  # Too few seeds.
    ],
)
def test_a_part_is_judged_by_four_of_five_seeds_and_their_spread(
    margins: Sequence[float], expected: ClaimOutcome
) -> None:
    assert judged(margins) is expected


def test_a_claim_is_shown_if_all_parts_are_and_refuted_if_one_is() -> None:
    good, none, bad = [1.0] * 5, [0.0] * 5, [-1.0] * 5
    assert outcome({"a": good, "b": good}) is ClaimOutcome.SHOWN
    assert outcome({"a": good, "b": none}) is ClaimOutcome.NOT_SHOWN
    assert outcome({"a": good, "b": none, "c": bad}) is ClaimOutcome.REFUTED


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_states_what_it_needs(name: str) -> None:
    claim = load(name)
    for text in (claim.paper, claim.sentence, claim.setup, claim.measure):
        assert len(text) > 20
    assert claim.paper[-4:].isdecimal()
    assert claim.seeds >= 5
    assert 0 < claim.minutes <= 10


# ------------------------------------------------------------ synthetic results

DEFAULT: Json = {
    "accuracy": 0.9, "test_loss": 0.3, "val_loss": 2.0, "seconds": 10.0, "step": 100,
    "push_bytes": 1e6, "fetch_bytes": 1e6, "cost": 5.0, "clock_gap": 0, "summed_values": 1000,
    "killed": 3, "weight": 1.0, "links": [100, 100],
}  # fmt: skip
Worlds = Mapping[str, tuple[Mapping[str, Json], Mapping[str, Json]]]
WORLDS: Worlds = {
    "adagrad-replicas": ({"sgd/36": {"accuracy": 0.1}}, {"adagrad/36": {"accuracy": 0.1}}),
    "warm-start": ({"without": {"accuracy": 0.1}}, {"with": {"accuracy": 0.1}}),
    "lbfgs-replicas": (
        {"8, one is slow": {"seconds": 11.0}},
        {"4 workers, some are killed": {"weight": 1.5}},
    ),
    "easgd-interval": (
        {"downpour, every 64": {"accuracy": 0.2}},
        {"easgd, every 64": {"accuracy": 0.2}},
    ),
    "error-feedback": (
        {
            "top-k": {"push_bytes": 2e4},
            "top-k, no feedback": {"push_bytes": 2e4, "test_loss": 2.0},
        },
        {"top-k": {"test_loss": 2.0, "push_bytes": 2e4}},
    ),
    "stale-synchronous": (
        {
            "s = 3": {"clock_gap": 3}, "s = 0": {"seconds": 20.0},
            "no bound": {"seconds": 5.0, "clock_gap": 9},
        },
        {"s = 3": {"clock_gap": 4}, "s = 0": {"seconds": 20.0}, "no bound": {"seconds": 5.0}},
    ),
    "backup-workers": (
        {"0 backup": {"cost": 8.0}, "8 backup": {"cost": 9.0}},
        {"2 backup": {"cost": 9.0}},
    ),
    "linear-scaling": (
        {"k = 12, rate not scaled": {"accuracy": 0.5}, "k = 32": {"accuracy": 0.5}},
        {"k = 4": {"accuracy": 0.5}, "k = 32": {"accuracy": 0.5}},
    ),
    "gossip-crossover": (
        {"gossip, 4": {"cost": 3.0}, "gossip, 24": {"accuracy": 0.8}},
        {"gossip, 4": {"cost": 7.0}, "gossip, 24": {"accuracy": 0.8}},
    ),
    "spread-servers": (
        {"one server": {"seconds": 20.0, "links": [500, 100]}},
        {"servers beside workers": {"links": [500, 100]}, "one server": {"seconds": 20.0}},
    ),
    "target-batch": (
        {"workers come and go": {"seconds": 12.0}},
        {"workers come and go": {"accuracy": 0.5}},
    ),
    "kfac-epochs": (
        {"K-FAC": {"cost": 2.0}, "K-FAC, lw": {"summed_values": 9000}},
        {"SGD": {"cost": 2.0}, "K-FAC, lw": {"summed_values": 9000}},
    ),
    "diloco-interval": (
        {"diloco": {"push_bytes": 1e4, "fetch_bytes": 1e4}},
        {"diloco": {"val_loss": 3.0, "push_bytes": 1e4, "fetch_bytes": 1e4}},
    ),
}  # fmt: skip
"""Name -> the arms that differ from `DEFAULT` where the claim holds, and where it is refuted."""


def _ran(values: Json, seed: int) -> Ran:
    """A run with these figures, which differ a little from seed to seed."""
    noise = 1 + SEED_NOISE * seed
    metrics = {key: values[key] * noise for key in ("accuracy", "test_loss", "val_loss")}
    cost = values["cost"] * noise
    reached = {"accuracy": 1.0, "val_loss": 0.0}
    links = {str(n): {"out_bytes": each, "in_bytes": 0} for n, each in enumerate(values["links"])}
    figures = {
        **{key: values[key] for key in ("seconds", "step", "push_bytes", "fetch_bytes")},
        "evaluation": metrics, "links": links,
        "evaluations": [{"metrics": reached, "seconds": cost, "samples": cost, "bytes": cost}],
    }  # fmt: skip
    simulated = {key: values[key] for key in ("clock_gap", "summed_values", "killed")}
    return Ran(figures, np.full(3, values["weight"], np.float32), simulated)


class SyntheticLab:
    """Tunes nothing, and returns runs of a world."""

    def __init__(self, world: Mapping[str, Json], seeds: int) -> None:
        self.seeds: Sequence[int] = range(1, 1 + seeds)
        self._world = world

    def place(self, example: str, job: str = "", files: Any = None) -> None:
        pass

    def tuned(self, arms: Mapping[str, Arm], target: str, trials: int) -> dict[str, Arm]:
        return {
            name: arm.having(dict.fromkeys(("optimizer.lr", "inner.lr"), 0.1))
            for name, arm in arms.items()
        }

    def run(self, arms: Mapping[str, Arm]) -> dict[str, list[Ran | None]]:
        found: dict[str, list[Ran | None]] = {}
        for name, arm in arms.items():
            optimizer = arm.changes.get("optimizer", {}).get("name", "")
            mine = self._world.get(name) or self._world.get(f"{optimizer}/{name}") or {}
            found[name] = [_ran({**DEFAULT, **mine}, seed) for seed in self.seeds]
        return found

    def loop(self, name: str, request: Json) -> Json:
        found: Json = self._world[name]
        return found if name != "delays" else found[f"{request['optimizer']} {request['hidden']}"]


@pytest.mark.parametrize("name", WORLDS)
def test_a_criterion_judges_runs_both_ways(name: str) -> None:
    claim = load(name)
    for world, expected in zip(
        WORLDS[name], (ClaimOutcome.SHOWN, ClaimOutcome.REFUTED), strict=True
    ):
        found = claim.experiment(SyntheticLab(world, claim.seeds))
        parts = {part: (judged(row), row) for part, row in found.margins.items()}
        assert outcome(found.margins) is expected, parts
        assert parts.keys() == claim.criterion.keys()
        assert claim.figure in ("", *found.figures)


def _delays(deep_momentum: int) -> Json:
    times = {"sgd 1": 110, "sgd 3": 150, "momentum 1": 200, "adagrad 1": 105, "adagrad 3": 110}
    times["momentum 3"] = deep_momentum
    row = {name: {"rounds": {"0": [100] * 5, "32": [n] * 5}} for name, n in times.items()}
    return {"delays": row}


LOOPS: Worlds = {
    "staleness-depth": (_delays(400), _delays(102)),
    "nopeek-leakage": (
        {"nopeek": {
            "0.0": [{"u_dcor2": 0.8, "error": 0.3, "accuracy": 0.96}] * 5,
            "0.2": [{"u_dcor2": 0.4, "error": 0.5, "accuracy": 0.95}] * 5,
            "0.5": [{"u_dcor2": 0.3, "error": 0.6, "accuracy": 0.9}] * 5,
        }},
        {"nopeek": {
            "0.0": [{"u_dcor2": 0.8, "error": 0.6, "accuracy": 0.96}] * 5,
            "0.2": [{"u_dcor2": 0.4, "error": 0.3, "accuracy": 0.95}] * 5,
            "0.5": [{"u_dcor2": 0.3, "error": 0.3, "accuracy": 0.95}] * 5,
        }},
    ),
    "hogwild-locks": (
        {"locks": {
            "one": {"seconds": [2.0] * 5, "loss": [0.5] * 5},
            "free": {"seconds": [1.0] * 5, "loss": [0.5] * 5},
            "locked": {"seconds": [2.0] * 5, "loss": [0.5] * 5},
        }},
        {"locks": {
            "one": {"seconds": [2.0] * 5, "loss": [0.5] * 5},
            "free": {"seconds": [1.0] * 5, "loss": [0.7] * 5},
            "locked": {"seconds": [2.0] * 5, "loss": [0.5] * 5},
        }},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_criterion_judges_loops_both_ways(name: str) -> None:
    claim = load(name)
    for world, expected in zip(
        LOOPS[name], (ClaimOutcome.SHOWN, ClaimOutcome.REFUTED), strict=True
    ):
        found = claim.experiment(SyntheticLab(world, claim.seeds))
        assert outcome(found.margins) is expected, found.margins
        assert found.margins.keys() == claim.criterion.keys()


def test_every_claim_has_synthetic_results() -> None:
    assert {*WORLDS, *LOOPS} == {*CLAIMS}
    assert len(CLAIMS) == 16


# ------------------------------------------------------------ real runs


def _tiny(lab: Lab) -> Evidence:
    from dlctl.study.claims import jobs

    job = jobs.digits(stop="steps = 4", workers=2, evaluation="every_steps = 2")
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    begun = Arm(method="sync", changes={"optimizer.lr": 1.0}, conditions={"step_s": 0.01})
    (arm,) = lab.tuned({"sync": begun}, "accuracy >= 0.999", 2).values()
    (runs,) = lab.run({"sync": arm}).values()
    accuracy = finals(runs, "accuracy", 0.0)
    assert all(run is not None and run.weights.shape == (4810,) for run in runs)
    return Evidence({"learns": within(accuracy, 1.0)}, {"accuracy": {"sync": accuracy}})


def test_a_claim_runs_and_its_record_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = PaperClaim(
        paper="x 2018", sentence="x", setup="x", measure="x", criterion={"learns": "x"},
        experiment=_tiny, minutes=1,
    )  # fmt: skip
    monkeypatch.setattr("dlctl.study.claims.load", lambda name: claim)
    file = tmp_path / "tiny.json"
    assert app.run(["claims", "run", "tiny", "--slots", "2", "--json", "-o", str(file)]) == 0
    record = claims.read(file)
    shown = json.loads(capsys.readouterr().out)
    assert shown["outcome"] == record["outcome"]
    assert record["simulated_runs"] == 2 + 5
    row = record["figures"]["accuracy"]["sync"]
    assert len(set(row)) > 1, "seeds differ"
    assert min(row) > 0


def test_claims_are_listed_and_a_wrong_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["claims", "ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["claims"]
    assert [one["name"] for one in listed] == [*CLAIMS]
    assert app.run(["claims", "ls", "kfac-epochs"]) == 0
    assert load("kfac-epochs").paper in capsys.readouterr().out
    assert app.run(["claims", "run", "kfac-epoch"]) == NotFound.exit_code
    assert "kfac-epochs" in capsys.readouterr().err


def test_the_page_has_the_outcome_of_every_record() -> None:
    page = (ROOT / "docs" / "claims.md").read_text()
    for name in CLAIMS:
        file = ROOT / "benchmarks" / "results" / "claims" / f"{name}.json"
        expected = "not run yet"
        if file.exists():
            record = claims.read(file)
            expected = record["outcome"]
            assert record["setup"] == load(name).setup, f"make claims ONLY={name}"
        assert f"| [{name}](#{name}) | {load(name).paper} | {expected} |" in page


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_runs_to_an_outcome(name: str) -> None:
    record = claims.run(name, 2)
    assert record["parts"].keys() == load(name).criterion.keys()
