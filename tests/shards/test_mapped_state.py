"""Whatever a server is killed in the middle of, the next one finds the state of a commit."""

from contextlib import suppress

import numpy as np
import pytest
from example_counts import times
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from kept_states import (
    BOOT,
    Killed,
    adagrad,
    bytes_for,
    created,
    dense,
    plain,
    reopened,
    snapshot,
    sparse,
    spec_of,
)

from dlctl.compress.base import Delta
from dlctl.optim.adam import Adam
from dlctl.shards import image, mapped, undo
from dlctl.shards.base import POINTS, Extras, Shard
from dlctl.shards.errors import Unusable
from dlctl.shards.mapped import Mapped

SIZE = 64
BLOCK, PLACES = 3, 2
"""Instead of 65,536 and 8,192: an update of a few elements has several blocks, too."""
SEEDS = st.integers(0, 1000)
OPTIMIZERS = {"adagrad": adagrad, "adam": lambda: Adam(Adam.Options(lr=0.1))}


class KilledAnywhere(RuleBasedStateMachine):
    """Updates, commits and kills in any order, beside a plain shard that nothing happens to."""

    @initialize(optimizer=st.sampled_from(sorted(OPTIMIZERS)))
    def begin(self, optimizer):
        self.new_optimizer = OPTIMIZERS[optimizer]
        self.spec = spec_of(self.new_optimizer(), SIZE)
        self.points_left = None
        self.is_written = False
        self.coming = None
        self.commits = 0
        self.buffer, self.shard = created(self.new_optimizer(), self.spec, self.point)
        self.model = plain(self.new_optimizer(), self.spec)
        self.committed = snapshot(self.model)
        self.meta = {}

    def point(self, name):
        if name == "commit begun":
            self.is_written = False
        if name == "commit written":
            self.is_written = True
        if self.points_left is not None:
            self.points_left -= 1
            if self.points_left < 0:
                raise Killed(name)

    def do(self, work, kill_after):
        """Do something in the mapped shard; True if it was killed on the way."""
        self.points_left = kill_after
        self.is_written = False
        try:
            work()
        except Killed:
            return True
        finally:
            self.points_left = None
        return False

    def come_back(self):
        """What the next process finds is the last commit, and the model goes back to it."""
        self.coming = None
        self.shard, meta = reopened(self.buffer, self.new_optimizer(), self.spec, self.point)
        assert meta == self.meta
        assert snapshot(self.shard) == self.committed
        self.model = plain(self.new_optimizer(), self.spec)
        self.model.storage.fill({"w": self.shard.w, **self.shard.slots}, None)
        self.model.version = self.shard.version
        self.model.optimizer.lr = self.shard.optimizer.lr
        self.model.optimizer.counters.update(self.shard.optimizer.counters)

    def update(self, delta, kill_after):
        if self.do(lambda: self.shard.apply(delta), kill_after):
            self.come_back()
        else:
            self.model.apply(delta)

    KILLS = st.none() | st.integers(0, 2) | st.integers(0, 60)

    @rule(seed=SEEDS, kill_after=KILLS)
    def dense_update(self, seed, kill_after):
        self.update(dense(seed, SIZE), kill_after)

    @rule(seed=SEEDS, count=st.integers(0, SIZE), kill_after=KILLS)
    def part_of_a_push_comes(self, seed, count, kill_after):
        is_new = self.coming is None
        if is_new:
            self.coming = (dense(seed, SIZE), Delta(np.full(SIZE, np.nan, np.float32)))
        sent, delta = self.coming
        delta.values[:count] = sent.values[:count]
        if self.do(lambda: self.shard.prepare(delta.values, count, is_new=is_new), kill_after):
            self.come_back()

    @precondition(lambda self: self.coming is not None)
    @rule(kill_after=KILLS)
    def the_rest_comes_and_is_applied(self, kill_after):
        (sent, delta), self.coming = self.coming, None
        delta.values[:] = sent.values
        self.update(delta, kill_after)

    @rule(seed=SEEDS, count=st.integers(0, SIZE // 16), kill_after=KILLS)
    def sparse_update(self, seed, count, kill_after):
        self.update(sparse(seed, SIZE, count), kill_after)

    @rule(seed=SEEDS, kill_after=KILLS)
    def update_of_half_the_elements(self, seed, kill_after):
        self.update(sparse(seed, SIZE, SIZE // 2), kill_after)

    @rule(seed=SEEDS, kill_after=KILLS)
    def whole_vectors_are_set(self, seed, kill_after):
        values = {"w": dense(seed, SIZE).values}
        if self.do(lambda: self.shard.storage.fill(values, None), kill_after):
            self.come_back()
        else:
            self.model.storage.fill(values, None)

    @rule(rate=st.floats(0.01, 1.0))
    def the_rate_changes(self, rate):
        self.shard.lr = self.model.lr = rate

    @rule(kill_after=st.none() | st.integers(0, 12))
    def commit(self, kill_after):
        self.commits += 1
        meta = {"commits": self.commits}
        killed = self.do(lambda: self.shard.commit(meta), kill_after)
        if self.is_written or not killed:
            self.committed, self.meta = snapshot(self.model), meta
        if killed:
            self.come_back()

    @rule()
    def kill_between_two_steps(self):
        self.come_back()

    @rule(kill_after=st.none() | st.integers(0, 3))
    def close_in_order(self, kill_after):
        self.do(self.shard.storage.close, kill_after)
        self.come_back()

    @invariant()
    def both_are_the_same(self):
        if hasattr(self, "shard"):
            assert snapshot(self.shard) == snapshot(self.model)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(mapped, "BLOCK", BLOCK)
    for module in (image, mapped, undo):
        monkeypatch.setattr(module, "PLACES", PLACES)


class TestKilledAnywhere(KilledAnywhere.TestCase):
    settings = times(1.5, stateful_step_count=25)


# ---------------------------------------------------------------- the same, one story at a time


def story(point, buffer, spec):
    """A state is made and goes through every kind of commit."""
    shard = Shard(adagrad(), Mapped.create(buffer, spec, BOOT, point))
    states = [snapshot(shard)]
    for number, delta in enumerate(
        [
            dense(1, SIZE),
            sparse(2, SIZE, 4),
            sparse(3, SIZE, 3),
            None,
            sparse(4, SIZE, 4),
            dense(5, SIZE),
        ]
    ):
        if delta is not None:
            shard.apply(delta)
        states.append(snapshot(shard))
        shard.commit({"number": number})
    shard.storage.close()
    return states


SPEC = spec_of(adagrad(), SIZE)


def points():
    """The names of the points that the story passes, in order."""
    passed = []
    story(passed.append, bytes_for(SPEC), SPEC)
    return passed


def test_the_points_are_at_every_step_that_could_be_the_last():
    assert set(points()) <= set(POINTS)
    assert set(points()) == {
        "state begun", "commit half written", "state created", "block updated", "commit begun",
        "commit written", "undo begun", "undo block written", "block scattered", "state sealed",
    }  # fmt: skip


def test_a_kill_at_each_point_of_a_story_leaves_one_of_its_states():
    states = story(lambda name: None, bytes_for(SPEC), SPEC)
    names = points()
    for at in range(len(names)):
        buffer = bytes_for(SPEC)
        last_log_lines = iter(names[:at])

        def point(name, last_log_lines=last_log_lines):
            if next(last_log_lines, None) is None:
                raise Killed(name)

        with pytest.raises(Killed):
            story(point, buffer, SPEC)
        passed = names[: at + 1]
        if "state created" not in passed:
            with pytest.raises(Unusable, match="killed"):
                reopened(buffer, adagrad(), SPEC)
            continue
        written = passed.count("commit written")
        shard, meta = reopened(buffer, adagrad(), SPEC)
        assert meta == ({"number": written - 1} if written else {}), names[at]
        assert snapshot(shard) == states[written], names[at]


def test_the_extras_are_there_again():
    spec = spec_of(adagrad(), 5, averaged=3)
    buffer, shard = created(adagrad(), spec)
    extras = Extras(np.array([1.0, np.nan, 3.0]))
    shard.storage.fill({"w": np.ones(5, np.float32)}, extras)
    shard.commit({"initialised": True})
    again, meta = reopened(buffer, adagrad(), spec)
    assert meta == {"initialised": True}
    assert again.storage.extras.averaged.tobytes() == extras.averaged.tobytes()
    assert again.w.tolist() == [1] * 5


EXTRAS = Extras(np.array([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "last", ["vector filled", "extras filled", "commit begun", "commit half written"]
)
def test_a_kill_while_the_first_values_are_set_leaves_a_state_that_can_be_set_again(last):
    spec = spec_of(adagrad(), 5, averaged=3)
    dies = [False]

    def point(name):
        if dies[0] and name == last:
            raise Killed(name)

    buffer, shard = created(adagrad(), spec, point)
    shard.commit({"initialised": False})
    dies[0] = True
    values = {"w": np.ones(5, np.float32)}
    with suppress(Killed):
        shard.storage.fill(values, EXTRAS)
        shard.commit({"initialised": True})
        pytest.fail("it was not killed")
    again, meta = reopened(buffer, adagrad(), spec)
    assert meta == {"initialised": False}
    assert not again.w.any()
    again.storage.fill(values, EXTRAS)
    again.commit({"initialised": True})
    third, meta = reopened(buffer, adagrad(), spec)
    assert meta == {"initialised": True}
    assert third.storage.extras.averaged.tolist() == [1, 2, 3]


def moved(shard, buffer):
    """The state goes on in another buffer, and the old one is overwritten with nonsense."""
    other = bytearray(len(buffer))
    shard.storage.move(other)
    buffer[:] = b"\xaa" * len(buffer)
    return other


@pytest.mark.parametrize(
    "delta", [None, dense(7, SIZE), sparse(7, SIZE, 4)], ids=["none", "dense", "sparse"]
)
def test_a_state_goes_on_in_another_buffer_with_all_that_it_has(delta):
    buffer, shard = created(adagrad(), SPEC)
    model = plain(adagrad(), SPEC)
    for each in (dense(1, SIZE), sparse(2, SIZE, 4), sparse(3, SIZE, 3)):
        shard.apply(each)
        model.apply(each)
        shard.commit({"number": 1})
    before = snapshot(shard)
    if delta is not None:
        shard.apply(delta)
        model.apply(delta)
    other = moved(shard, buffer)
    assert snapshot(reopened(other.copy(), adagrad(), SPEC)[0]) == before
    assert snapshot(shard) == snapshot(model)
    shard.commit({"number": 2})
    for each in (sparse(4, SIZE, 4), dense(5, SIZE)):
        shard.apply(each)
        model.apply(each)
        shard.commit({"number": 3})
    again, meta = reopened(other, adagrad(), SPEC)
    assert (snapshot(again), meta) == (snapshot(model), {"number": 3})


def test_a_copy_that_was_not_finished_is_no_state():
    def point(name):
        if name == "state copied":
            raise Killed(name)

    buffer, shard = created(adagrad(), SPEC, point)
    shard.commit({"number": 1})
    other = bytearray(len(buffer))
    with pytest.raises(Killed):
        shard.storage.move(other)
    with pytest.raises(Unusable, match="killed"):
        reopened(other, adagrad(), SPEC)
    assert reopened(buffer, adagrad(), SPEC)[1] == {"number": 1}


@pytest.mark.parametrize("size", [0, 1, 15, 16])
def test_the_smallest_shards_survive_too(size):
    spec = spec_of(adagrad(), size)
    buffer, shard = created(adagrad(), spec)
    model = plain(adagrad(), spec)
    for seed in range(4):
        for delta in (dense(seed, size), sparse(seed, size, size // 16)):
            shard.apply(delta)
            model.apply(delta)
            shard.commit({})
    assert snapshot(reopened(buffer, adagrad(), spec)[0]) == snapshot(model)


def test_looking_at_an_update_that_is_not_committed_writes_nothing():
    buffer, shard = created(adagrad(), SPEC)
    shard.commit({})
    shard.apply(sparse(1, SIZE, 4))
    before = bytes(buffer)
    assert np.count_nonzero(shard.w) == 4
    assert np.count_nonzero(shard.slots["sum"] != np.float32(0.1)) == 4
    assert bytes(buffer) == before
