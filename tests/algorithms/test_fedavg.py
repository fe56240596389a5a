"""Whose samples are whose, and what clipping and noise make of a mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlctl.algorithms import privacy
from dlctl.algorithms.base import DataEpoch, Decision
from dlctl.algorithms.methods.fedavg import FedAvgLead, Options, Private, check
from dlctl.algorithms.quorum import Chosen
from dlctl.compress.base import Delta
from dlctl.errors import DlctlError
from dlctl.job.clients import Clients, cohort, cut
from dlctl.job.config import Choice, Data, Job, JobFile
from dlctl.optim.sgd import SGD
from dlctl.shards.memory import in_memory
from dlctl.wire import messages as m
from dlctl.wire.messages import Array

SAMPLES = 1000
LABELS = np.arange(SAMPLES) % 10


def parts_of(kind: str, clients: int, alpha: float = 0.5, seed: int = 0) -> list[Array]:
    return cut(SAMPLES, clients, kind, alpha=alpha, seed=seed, labels=lambda: LABELS)


def labels_per_client(parts: list[Array]) -> float:
    return float(np.mean([len(np.unique(LABELS[part])) for part in parts]))


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("kind", ["iid", "shards", "dirichlet"])
@pytest.mark.parametrize("clients", [1, 7, 100, SAMPLES])
def test_every_sample_is_somebody_s_and_nobody_has_none(kind: str, clients: int) -> None:
    parts = parts_of(kind, clients, alpha=0.05)
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(SAMPLES))
    again = parts_of(kind, clients, alpha=0.05)
    assert all(map(np.array_equal, parts, again))


def test_clients_differ_as_they_are_told_to() -> None:
    assert labels_per_client(parts_of("iid", 20)) > 9.5
    assert labels_per_client(parts_of("shards", 50)) <= 3
    even, uneven = (parts_of("dirichlet", 20, alpha) for alpha in (100.0, 0.1))
    assert labels_per_client(even) > 9.5
    assert labels_per_client(uneven) < 7
    with pytest.raises(ValueError, match=r"1001.*1000"):
        parts_of("iid", SAMPLES + 1)


def test_a_client_goes_over_all_its_rows_in_every_pass_and_in_another_order() -> None:
    parts = [np.arange(10), np.arange(10, 13)]
    clients = Clients(parts, seed=1, shuffle=True)
    assert clients.sizes == (10, 3)
    whole = clients.rows(4, 0, 0, 30)
    for begin in (0, 10, 20):
        assert sorted(whole[begin : begin + 10]) == list(range(10))
    assert len({tuple(whole[begin : begin + 10]) for begin in (0, 10, 20)}) == 3
    assert np.array_equal(clients.rows(4, 0, 7, 23), whole[7:23])
    assert not np.array_equal(clients.rows(5, 0, 0, 30), whole)
    in_order = Clients(parts, seed=1, shuffle=False)
    assert in_order.rows(4, 1, 1, 5).tolist() == [11, 12, 10, 11]


def test_all_clients_are_drawn_alike() -> None:
    times = np.zeros(10)
    for data_epoch in range(2000):
        drawn = cohort(7, data_epoch, 10, 3)
        assert len(set(drawn)) == 3
        times[drawn] += 1
    assert np.all(np.abs(times - 600) < 90), "3.6 standard deviations and more"


# ---------------------------------------------------------------- rounds


ALL_LEASED = DataEpoch(4, 0, {0: 3, 1: 1})


def lead_of(epoch: DataEpoch = ALL_LEASED, **options: Any) -> FedAvgLead:
    lead = FedAvgLead(Options(**options))
    lead.epoch = epoch
    return lead


EVERYBODY = frozenset({0, 1, 2})


def test_a_round_waits_for_those_who_have_clients_of_it() -> None:
    lead = lead_of()
    assert lead.quorum(0, {0: 30, 2: 0}, EVERYBODY, 0.0) is None
    assert not lead.cut_epoch()
    assert lead.quorum(0, {0: 30, 1: 9}, EVERYBODY, 0.0) == {0, 1}
    assert lead.cut_epoch()
    assert not lead.cut_epoch()


def test_a_round_does_not_wait_for_a_client_that_nobody_trains() -> None:
    """Its worker has died, and all others have pushed."""
    lead = lead_of(DataEpoch(4, 1, {0: 3}))
    assert lead.quorum(0, {0: 30}, EVERYBODY, 0.0) is None, "others may take it"
    assert lead.quorum(0, {0: 30, 1: 0, 2: 0}, EVERYBODY, 0.0) == EVERYBODY
    assert lead.cut_epoch()


def test_a_round_that_nobody_has_brought_anything_to_is_not_over() -> None:
    lead = lead_of(DataEpoch(4, 4, {}))
    assert lead.quorum(0, dict.fromkeys(EVERYBODY, 0), EVERYBODY, 0.0) == EVERYBODY
    assert not lead.cut_epoch()


def test_a_deadline_counts_clients_and_no_workers() -> None:
    lead = lead_of(round_s=5.0, clients_min=2)
    assert lead.quorum(0, {0: 30}, EVERYBODY, 4.9) == 5.0
    assert lead.quorum(0, {1: 30}, EVERYBODY, 5.0) is None
    assert lead.quorum(0, {0: 30}, EVERYBODY, 5.0) == {0}


# ---------------------------------------------------------------- differential privacy


def updated(options: Options, *pushes: tuple[Array, int], lo: int = 0, size: int = 4) -> Array:
    """What a shard of zeros is after one step with these (vector, samples)."""
    shard = in_memory(SGD(SGD.Options(lr=1.0)), np.zeros(size, np.float32))
    side = Chosen(options, shard)
    side.mean = Private(side)
    side.lo = lo
    for slot, (vector, samples) in enumerate(pushes):
        packed = m.Packed("none", size, (vector,))
        side.push(m.Push(slot, 1, 1, 1, 0, 0, 0, samples, 0, packed), Delta(vector))
    used = frozenset((slot, 1) for slot in range(len(pushes)))
    side.decided(Decision(0, used, frozenset()))
    assert shard.version == 1
    return shard.w.copy()


def test_with_a_limit_a_sum_is_over_a_number_that_stays() -> None:
    one, two = np.full(4, 1, "f4"), np.full(4, 2, "f4")
    mean = updated(Options(), (one, 10), (two, 30))
    assert np.allclose(mean, -1.75)
    private = Options(clip_norm=1.0, clients_per_round=8)
    assert np.allclose(updated(private, (one, 10), (two, 30)), -3 / 8)


def test_noise_is_of_its_size_and_the_same_again_for_the_same_step_alone() -> None:
    size, zeros = 20_000, np.zeros(20_000, "f4")
    options = Options(clip_norm=2.0, clients_per_round=5, noise_multiplier=1.5, noise_seed=9)
    noise = updated(options, (zeros, 1), (zeros, 1), size=size)
    assert noise.std() == pytest.approx(1.5 * 2.0 / 5, rel=0.03)
    assert abs(noise.mean()) < 0.02
    assert np.array_equal(noise, updated(options, (zeros, 1), (zeros, 1), size=size))
    others = [updated(options, (zeros, 1), lo=size, size=size)]
    others.append(updated(Options(**{**vars_of(options), "noise_seed": 10}), (zeros, 1), size=size))
    for other in others:
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.03


def vars_of(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in Options.__dataclass_fields__}


def faults(data: Data | None = None, compression: str = "none", **options: Any) -> list[str]:
    job = JobFile(
        job=Job(name="a", task="train.py:task"),
        algorithm=Choice(name="fedavg", options=vars_of(Options(**options))),
        compression=Choice(name=compression),
        data=data or Data(clients=100),
    )
    return [".".join(path) for path, *_ in check(job)]


def test_what_privacy_needs_is_said_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "has_accountant", lambda: False)
    private = {"clip_norm": 1.0, "clients_per_round": 10}
    assert faults() == faults(**private) == []
    assert faults(noise_multiplier=1.0) == ["algorithm.noise_multiplier"]
    assert faults(clip_norm=1.0) == faults(Data(), **private) == ["algorithm.clip_norm"]
    assert faults(compression="topk", **private) == ["compression.name"]
    assert faults(noise_multiplier=1.0, **private) == ["algorithm.noise_multiplier"]
    monkeypatch.setattr(privacy, "has_accountant", lambda: True)
    assert faults(noise_multiplier=1.0, **private) == []
    lead = FedAvgLead(Options(**private))
    with pytest.raises(DlctlError, match=r"10\b.* 9 "):
        lead.cohort(9)


def test_epsilon_adds_up_over_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an accountant that stands for the package: RDP of the plain Gaussian mechanism."""

    class Accountant:
        def __init__(self, orders: Any, relation: str) -> None:
            assert relation == "replace one"
            self.orders, self.rdp = orders, np.zeros(len(orders))

        def compose(self, event: Any) -> None:
            clients, drawn, noise = event
            assert (clients, drawn) == (100, 10)
            self.rdp += np.array(self.orders) / (2 * noise**2)

    def compute_epsilon(orders: Any, rdp: Any, delta: float) -> tuple[float, int]:
        bounds = [r + np.log(1 / delta) / (a - 1) for a, r in zip(orders, rdp, strict=True)]
        return min(bounds), 0

    dp = SimpleNamespace(
        NeighboringRelation=SimpleNamespace(REPLACE_ONE="replace one"),
        GaussianDpEvent=lambda noise: noise,
        SampledWithoutReplacementDpEvent=lambda *event: event,
    )
    rdp = SimpleNamespace(RdpAccountant=Accountant, compute_epsilon=compute_epsilon)
    monkeypatch.setattr(privacy, "accounting", lambda: (dp, rdp))
    privacy._of_round.cache_clear()
    lead = FedAvgLead(
        Options(clip_norm=1.0, noise_multiplier=8.0, clients_per_round=10, delta=1e-3)
    )
    assert "epsilon" not in lead.figures(), "nobody has said how many clients there are"
    lead.cohort(100)
    found = [lead.figures()["epsilon"]]
    lead.epoch = DataEpoch(10, 0, {0: 10})
    for clock in range(4):
        assert lead.quorum(clock, {0: 50}, frozenset({0}), 0.0) == {0}
        found.append(lead.figures()["epsilon"])
    privacy._of_round.cache_clear()
    assert found[0] == 0
    expected = min(4 * a / 32 + np.log(1e3) / (a - 1) for a in privacy._ORDERS)
    assert found[-1] == pytest.approx(expected, abs=1e-4)
    assert found == sorted(found)
