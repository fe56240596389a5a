"""A buffer before every optimiser, on every storage: a push that is in a commit is in the buffer or
in the values, once, whenever its server is killed.
"""

import numpy as np
import pytest
from kept_states import Killed, dense, snapshot, sparse

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.optim import buffered
from dlctl.optim.buffered import BUFFER, BUFFERED, STEPS, Buffered
from dlctl.shards.base import Shard, Spec, no_point
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.sim.states import MemoryLog

NAMES = registry.names("optimizers")
SIZE, CAPACITY = 400, 3
MIXED = [sparse(1, SIZE, 9), dense(2, SIZE), sparse(3, SIZE, 0), sparse(4, SIZE, 20)]
PUSHES = {
    "dense": [dense(seed, SIZE) for seed in range(7)],
    "sparse": [sparse(seed, SIZE, 12) for seed in range(7)],
    "mixed": [*MIXED, *MIXED[:3]],
}


def optimizer(name):
    kind = registry.load("optimizers", name)
    return Buffered(kind(kind.Options(lr=0.5)), CAPACITY)


class OnMapped:
    def __init__(self, spec):
        self.spec, self.buffer = spec, bytearray(ImageForm.of(spec, "boot").total_bytes)

    def create(self, point=no_point):
        return Mapped.create(self.buffer, self.spec, "boot", point)

    def reopen(self):
        return Mapped.reopen(self.buffer, self.spec, "boot")


class OnJournal:
    def __init__(self, spec):
        self.spec, self.log = spec, MemoryLog()

    def create(self, point=no_point):
        return Journaled.create(self.log, self.spec, point)

    def reopen(self):
        return Journaled(self.log, self.spec)


class InOneMemory:
    """Of what is not kept nothing is found again: its process is never killed."""

    def __init__(self, spec):
        self.spec = spec

    def create(self, point=no_point):
        return InMemory().create(self.spec)


def begun(name, place, point=no_point):
    there = place(Spec("run", 0, 0, SIZE, optimizer(name).slots))
    shard = Shard(optimizer(name), there.create(point))
    shard.storage.fill({"w": np.linspace(-1, 1, SIZE, dtype=np.float32)}, None)
    shard.commit({"pushes": 0})
    return there, shard


def whole(delta):
    full = np.zeros(SIZE, np.float32)
    full[slice(None) if delta.indices is None else delta.indices] = delta.values
    return full


@pytest.mark.per_commit("name")
@pytest.mark.parametrize("pushes", PUSHES)
@pytest.mark.parametrize("place", [InOneMemory, OnMapped, OnJournal])
@pytest.mark.parametrize("name", NAMES)
def test_every_third_push_is_one_update_by_the_mean_of_three(name, place, pushes):
    """Whatever elements the third one has, the others' are in it, too."""
    _, shard = begun(name, place)
    _, plain = begun(name, InOneMemory)
    plain = Shard(plain.optimizer.inner, plain.storage)
    buffer = np.zeros(SIZE, np.float32)
    for number, delta in enumerate(PUSHES[pushes], 1):
        shard.apply(delta)
        shard.commit({"pushes": number})
        buffer = buffer + whole(delta)
        if number % CAPACITY == 0:
            slots = plain.storage._slots
            plain.storage._slots = {n: v for n, v in slots.items() if n != BUFFER}
            plain.apply(Delta(buffer * np.float32(1 / CAPACITY)))
            buffer = np.zeros(SIZE, np.float32)
        assert shard.w.tobytes() == plain.w.tobytes()
        assert shard.slots[BUFFER].tobytes() == buffer.tobytes()
        counters = shard.optimizer.counters
        assert (counters[BUFFERED], counters[STEPS]) == (number % CAPACITY, number // CAPACITY)


@pytest.mark.per_commit("name")
@pytest.mark.parametrize("pushes", PUSHES)
@pytest.mark.parametrize("place", [OnMapped, OnJournal])
@pytest.mark.parametrize("name", NAMES)
def test_a_kill_at_any_point_loses_no_push_and_has_none_twice(name, place, pushes):
    """Who pushes sends again what is not in a commit."""
    _, undisturbed = begun(name, InOneMemory)
    for delta in PUSHES[pushes]:
        undisturbed.apply(delta)

    def run(kill_at):
        passed = []

        def point(what):
            passed.append(what)
            if len(passed) == kill_at:
                raise Killed(what)

        armed = [no_point]
        there, shard = begun(name, place, lambda what: armed[0](what))
        armed[0] = point
        committed, count = 0, len(PUSHES[pushes])
        while committed < count:
            try:
                shard.apply(PUSHES[pushes][committed])
                shard.commit({"pushes": committed + 1})
                committed += 1
            except Killed:
                shard = Shard(optimizer(name), there.reopen())
                committed = shard.resume()["pushes"]
        return shard, len(passed)

    _, points = run(0)
    assert points >= 2 * len(PUSHES[pushes])
    for kill_at in range(1, points + 1):
        assert snapshot(run(kill_at)[0]) == snapshot(undisturbed), kill_at


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_that_changes_counts_from_the_next_step_on(name):
    _, shard = begun(name, InOneMemory)
    shard.lr = 0.0
    for delta in PUSHES["dense"][:CAPACITY]:
        shard.apply(delta)
    assert shard.w.tobytes() == np.linspace(-1, 1, SIZE, dtype=np.float32).tobytes()
    assert shard.optimizer.inner.lr == 0.0


@pytest.mark.parametrize("place", [OnMapped, OnJournal])
def test_a_capacity_that_is_told_counts_with_that_push_and_survives(place):
    """Of five pushes the third makes room for two, which are three then."""
    there, shard = begun("sgd", place)
    values = [np.full(SIZE, n, np.float32) for n in (1, 2, 4, 8, 16)]
    capacities = [9, 9, 2, 2, 2]
    for number, (g, capacity) in enumerate(zip(values, capacities, strict=True), 1):
        shard.apply(Delta(g), 1, counters={buffered.CAPACITY: capacity})
        shard.commit({"pushes": number})
        shard = Shard(optimizer("sgd"), there.reopen())
        assert shard.resume() == {"pushes": number}
    mean = np.float32(0.5) * (np.float32(7) * np.float32(1 / 3) + np.float32(12))
    np.testing.assert_allclose(shard.w, np.linspace(-1, 1, SIZE) - mean, rtol=0, atol=1e-5)
    assert (shard.optimizer.counters[BUFFERED], shard.optimizer.counters[STEPS]) == (0, 2)
