"""A benchmark of a server that does not do its work must fail, and not be fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import roundtrip_dense
from benchmarks.figures import take_turns
from benchmarks.peers import bouncing
from benchmarks.replay import Gradients, Replay
from benchmarks.roundtrip_dense import _here
from benchmarks.shard import Worker, shard
from daemons.worker.mkl_first_calls import make_first_calls
from dlctl.compress.none import Dense, DenseOptions
from dlctl.wire.messages import Packed

SIZE, PUSHES = 5000, 30
OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replay_is_what_torch_makes_of_the_same_gradients(optimizer: str) -> None:
    make_first_calls()
    gradients = Gradients("test", optimizer, SIZE)
    w = torch.zeros(SIZE, requires_grad=True)
    by_torch = OPTIMIZERS[optimizer]([w], lr=0.01)
    for _ in range(PUSHES):
        gradients.fill()
        w.grad = torch.from_numpy(gradients.gradient.copy())
        by_torch.step()
    gradients.compare(w.detach().numpy(), PUSHES)


@pytest.mark.parametrize("pushes", [1, 10_000])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_push_too_many_is_noticed_however_many_there_are(optimizer: str, pushes: int) -> None:
    gradient = np.random.default_rng(0).standard_normal(SIZE, dtype=np.float32)
    replay, other = Replay("push: dense", optimizer, SIZE), Replay("other", optimizer, SIZE)
    replay.push(gradient, pushes)
    other.push(gradient, pushes + 1)
    found = np.zeros(SIZE, np.float32)
    found[other.where] = other._w
    other.compare(found, pushes + 1)
    with pytest.raises(RuntimeError, match=f"push: dense: .*{pushes} pushes"):
        replay.compare(found, pushes)
    with pytest.raises(RuntimeError, match=f"version {pushes + 1} after {pushes} pushes"):
        replay.compare(found, pushes + 1)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_real_server_has_what_was_pushed_and_one_with_a_push_less_has_not(
    optimizer: str, tmp_path: Path
) -> None:
    gradients, compressor = Gradients("test", optimizer, SIZE), Dense(DenseOptions())
    with shard(tmp_path, "ipc", SIZE, optimizer) as worker:
        for _ in range(PUSHES):
            gradients.fill()
            worker.push(compressor.take(gradients.gradient))
        gradients.compare(worker.fetch(), worker.version)
        gradients.fill()
        with pytest.raises(RuntimeError):
            gradients.compare(worker.fetch(), worker.version + 1)


def test_a_round_trip_whose_pushes_are_zeros_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were when the gradient was not filled again."""
    push_and_update = Worker.push_and_update

    def emptied(self: Worker, delta: Packed, model: np.ndarray) -> int:
        delta.arrays[0][:] = 0
        return push_and_update(self, delta, model)

    monkeypatch.setattr(Worker, "push_and_update", emptied)
    monkeypatch.setattr(roundtrip_dense, "REPEATS", {SIZE: 5})
    with pytest.raises(
        RuntimeError, match=f"roundtrip: {SIZE:,} parameters, ipc: the server's state"
    ):
        _here(SIZE, "ipc", rounds=1)


@pytest.mark.long
def test_all_pushes_of_all_workers_are_looked_at_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bouncing.crew(bouncing.OURS, workers=2, size=SIZE, count=3) as crew:
        crew.work()
        crew.work()
    count = crew.rounds * 2 * 3
    monkeypatch.setattr(Replay, "push", lambda replay, g, times: setattr(replay, "_pushes", times))
    with (
        pytest.raises(RuntimeError, match=f"roundtrip: .* after {count // 2} pushes is wrong"),
        bouncing.crew(bouncing.OURS, workers=2, size=SIZE, count=3) as crew,
    ):
        crew.work()


def test_what_is_prepared_comes_before_each_call_and_is_not_timed() -> None:
    done: list[str] = []
    take_turns(
        1, lambda: done.append("ours"), lambda: done.append("bare"), 2,
        lambda: done.append("fill"), lambda: done.append("fill the other's"),
    )  # fmt: skip
    assert done == ["fill", "ours"] * 2 + ["fill the other's", "bare"] * 2 + done[:8]
