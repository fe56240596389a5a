"""Every optimiser on every storage: bit for bit what plain arrays give, also over restarts."""

import numpy as np
import pytest
from kept_states import dense, snapshot, sparse

from dlctl import registry
from dlctl.shards.base import Shard, Spec
from dlctl.shards.errors import Diverged
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.sim.states import MemoryLog
from dlctl.util.threads import BLOCK, PART

NAMES = registry.names("optimizers")
SIZE = 2 * BLOCK + 17
DELTAS = {
    "dense": [dense(seed, SIZE) for seed in range(4)],
    "sparse": [sparse(seed, SIZE, SIZE // 100) for seed in range(4)],
    "nothing": [sparse(seed, SIZE, 0) for seed in range(2)],
    "a third": [sparse(seed, SIZE, SIZE // 3) for seed in range(3)],
    "mixed": [dense(1, SIZE), sparse(2, SIZE, 900), sparse(3, SIZE, 900), dense(4, SIZE)],
}


class OnMapped:
    def __init__(self, spec):
        self.spec = spec
        self.buffer = bytearray(ImageForm.of(spec, "boot").total_bytes)

    def create(self):
        return Mapped.create(self.buffer, self.spec, "boot")

    def reopen(self):
        return Mapped.reopen(self.buffer, self.spec, "boot")


class OnJournal:
    def __init__(self, spec):
        self.spec = spec
        self.log = MemoryLog()

    def create(self):
        return Journaled.create(self.log, self.spec)

    def reopen(self):
        return Journaled(self.log, self.spec)


@pytest.mark.per_commit("name")
@pytest.mark.parametrize("deltas", DELTAS)
@pytest.mark.parametrize("place", [OnMapped, OnJournal])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("every", [1, 2])
def test_all_storages_come_to_the_same_to_the_last_bit(name, place, deltas, every):
    """A commit after every update or every second one, and another server after every commit."""
    kind = registry.load("optimizers", name)
    spec = Spec("run", 0, 0, SIZE, kind(kind.Options()).slots)
    plain = Shard(kind(kind.Options()), InMemory().create(spec))
    there = place(spec)
    shard = Shard(kind(kind.Options()), there.create())
    start = {"w": np.linspace(-1, 1, SIZE, dtype=np.float32)}
    for each in (plain, shard):
        each.storage.fill(start, None)
    shard.commit({})
    for number, delta in enumerate(DELTAS[deltas]):
        plain.apply(delta)
        shard.apply(delta)
        assert snapshot(shard) == snapshot(plain)
        if number % every == every - 1:
            shard.commit({"number": number})
            shard = Shard(kind(kind.Options()), there.reopen())
            assert shard.resume() == {"number": number}
            assert snapshot(shard) == snapshot(plain)


@pytest.mark.parametrize("name", NAMES)
def test_pushes_at_the_largest_norm_never_make_anything_infinite(name):
    """What `servers.push_norm_max` promises, at the largest rate, by pushes that do their worst."""
    kind = registry.load("optimizers", name)
    options = {"lr": 1e6}
    if "weight_decay" in kind.Options.__dataclass_fields__:
        options["weight_decay"] = 1e-6
    if "eps" in kind.Options.__dataclass_fields__:
        options["eps"] = 1e-12
    largest, tiny = np.float32(1e9), np.float32(1e-30)
    rng = np.random.default_rng(0)
    optimizer = kind(kind.Options(**options))
    spec = Spec("run", 0, 0, 6, optimizer.slots)
    shard = Shard(optimizer, InMemory().create(spec))
    for step in range(3000):
        same = largest
        once = largest if step == 0 else 0.0
        turns = largest * (-1) ** step
        rare = largest if step % 500 == 0 else tiny
        gradient = [same, once, turns, rare, rng.choice([largest, tiny, 0]), tiny]
        shard.apply(type(DELTAS["dense"][0])(np.array(gradient, np.float32)))
    for array in (shard.w, *shard.slots.values()):
        assert np.isfinite(array).all()


def far(delta):
    """No server takes so much."""
    return delta._replace(values=delta.values * np.float32(1e36))


PUSHED = {
    "dense": lambda seed: dense(seed, SIZE),
    "sparse": lambda seed: sparse(seed, SIZE, SIZE // 100),
    "a third": lambda seed: sparse(seed, SIZE, SIZE // 3),
}


BOUNDED = {"lion"}
"""Nothing that is finite makes these come to infinity: a step is as long as the rate."""


@pytest.mark.per_commit("name")
@pytest.mark.parametrize("pushed", PUSHED)
@pytest.mark.parametrize("place", [OnMapped, OnJournal])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in BOUNDED])
def test_what_would_become_infinite_is_in_no_commit(name, place, pushed):
    """Whatever the rule: it is noticed before anybody is told, and the next server finds what was
    there before."""
    kind = registry.load("optimizers", name)
    spec = Spec("run", 0, 0, SIZE, kind(kind.Options()).slots)
    there = place(spec)
    shard = Shard(kind(kind.Options(lr=1e6)), there.create())
    shard.storage.fill({"w": np.linspace(-1, 1, SIZE, dtype=np.float32)}, None)
    shard.commit({})
    shard.apply(PUSHED[pushed](0))
    shard.commit({})
    before = snapshot(shard)
    with pytest.raises(Diverged):
        shard.apply(far(PUSHED[pushed](1)))
    shard.storage.close()
    again = Shard(kind(kind.Options()), there.reopen())
    again.resume()
    assert snapshot(again) == before
    assert all(np.isfinite(vector).all() for vector in (again.w, *again.slots.values()))


@pytest.mark.parametrize("name", sorted(BOUNDED))
def test_what_is_bounded_stays_finite_whatever_is_pushed(name):
    kind = registry.load("optimizers", name)
    optimizer = kind(kind.Options(lr=1e6))
    shard = Shard(optimizer, InMemory().create(Spec("run", 0, 0, SIZE, optimizer.slots)))
    for seed in range(20):
        shard.apply(far(PUSHED["dense"](seed)))
        shard.commit({})
    assert all(np.isfinite(vector).all() for vector in (shard.w, *shard.slots.values()))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_processor_takes_note_of_for_nothing_stops_nobody(name):
    """Of a push that was refused, or with a rule that puts right what it has divided by zero."""
    kind = registry.load("optimizers", name)
    optimizer = kind(kind.Options())
    shard = Shard(optimizer, InMemory().create(Spec("run", 0, 0, 3, optimizer.slots)))
    shard._alarm.has_rung = True
    shard.apply(dense(1, 3))
    assert (shard.version, shard._alarm.has_rung) == (1, False)


WRONG = {
    "overflow": lambda w: np.multiply(w, 1e30, out=w),
    "division by zero": lambda w: np.divide(w, w * 0, out=w),
    "zero by zero": lambda w: np.divide(w * 0, w * 0, out=w),
    "root": lambda w: np.sqrt(-w, out=w),
    "a number too large for float32": lambda w: np.multiply(w, 1e300, out=w),
}


class Wrong:
    """A rule of somebody else's."""

    lr = 1.0

    def __init__(self, how):
        self.slots, self.counters, self.how = {}, {}, how

    def begin_update(self):
        return lambda blocks: [self.how(block.w[-1:]) for block in blocks]


@pytest.mark.parametrize("how", WRONG)
def test_the_alarm_rings_whatever_has_made_something_infinite_or_nan(how):
    """In the threads of a large update, too."""
    size = 2 * PART + 3
    shard = Shard(Wrong(WRONG[how]), InMemory().create(Spec("run", 0, 0, size, {})))
    shard.storage.fill({"w": np.full(size, 1e10, np.float32)}, None)
    with pytest.raises(Diverged):
        shard.apply(dense(1, size))
