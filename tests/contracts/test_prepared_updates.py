"""Updates that were begun while their values still came: nothing can be seen of them before, and
they come to what they would have come to anyway, to the last bit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from kept_states import dense, snapshot, sparse

from dlctl import registry
from dlctl.compress.base import Delta
from dlctl.model.vector import euclidean_norm, squared_norm
from dlctl.optim.blocks import Block, BlockPlace
from dlctl.shards.ahead import Ahead
from dlctl.shards.base import Shard, Spec
from dlctl.shards.errors import Diverged
from dlctl.shards.image import ImageForm
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.shards.memory import InMemory
from dlctl.sim.states import MemoryLog
from dlctl.util import threads

NAMES = registry.names("optimizers")
SIZE = 3000
PLACES = {
    "memory": lambda spec: InMemory().create(spec),
    "mapped": lambda spec: Mapped.create(
        bytearray(ImageForm.of(spec, "boot").total_bytes), spec, "boot"
    ),
    "journal": lambda spec: Journaled.create(MemoryLog(), spec),
}


class Values:
    """A push whose values come one after the other; what has not come is NaN."""

    def __init__(self, seed: int, size: int = SIZE) -> None:
        self.delta = Delta(np.full(size, np.nan, np.float32))
        self._sent = dense(seed, size).values
        self._is_new = True

    def come(self, shard: Shard, count: int) -> None:
        self.delta.values[:count] = self._sent[:count]
        if shard.prepare(self.delta.values, count, is_new=self._is_new):
            self._is_new = False

    def whole(self) -> Delta:
        self.delta.values[:] = self._sent
        return self.delta


class Pair:
    """A shard that prepares updates, and one that knows nothing of that."""

    def __init__(self, name: str, place: str, size: int = SIZE) -> None:
        kind = registry.load("optimizers", name)
        spec = Spec("run", 0, 0, size, kind(kind.Options()).slots)
        self.plain = Shard(kind(kind.Options()), InMemory().create(spec))
        self.shard = Shard(kind(kind.Options()), PLACES[place](spec))
        start = {"w": np.linspace(-1, 1, size, dtype=np.float32)}
        for each in (self.plain, self.shard):
            each.storage.fill(start, None)
            each.commit({})

    def apply(self, delta: Delta) -> None:
        for each in (self.plain, self.shard):
            each.apply(Delta(*(part if part is None else part.copy() for part in delta)))
            each.commit({})
        self.check()

    def apply_prepared(self, values: Values) -> None:
        self.plain.apply(Delta(values.whole().values.copy()))
        self.shard.apply(values.whole())
        self.check()
        self.shard.commit({})

    def check(self) -> None:
        assert snapshot(self.shard) == snapshot(self.plain)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=PLACES)
def pair(request: pytest.FixtureRequest, name: str) -> Pair:
    return Pair(name, request.param)


def test_what_came_piece_by_piece_is_the_same_and_not_seen_before(pair: Pair) -> None:
    for seed in range(4):
        values = Values(seed)
        for count in sorted(np.random.default_rng(seed).integers(0, SIZE, 5, endpoint=True)):
            values.come(pair.shard, int(count))
            pair.check()
        pair.apply_prepared(values)


@pytest.mark.parametrize("other", [dense(7, SIZE), sparse(7, SIZE, 30), sparse(7, SIZE, 900)])
def test_another_update_that_comes_first_is_applied_and_not_lost(pair: Pair, other: Delta) -> None:
    pair.apply(dense(1, SIZE))
    values = Values(2)
    values.come(pair.shard, SIZE // 2)
    pair.apply(other)
    values.come(pair.shard, SIZE - 1)
    pair.apply(other)
    pair.apply_prepared(values)


def test_what_never_comes_to_its_end_leaves_nothing(pair: Pair) -> None:
    for seed in range(3):
        Values(seed).come(pair.shard, SIZE - seed)
        Values(seed + 10).come(pair.shard, SIZE)
        pair.apply(dense(seed + 20, SIZE))


def test_a_rate_that_changes_meanwhile_is_the_one_that_counts(pair: Pair) -> None:
    values = Values(1)
    values.come(pair.shard, SIZE // 2)
    pair.shard.lr = pair.plain.lr = 3 * pair.plain.lr
    values.come(pair.shard, SIZE - 7)
    pair.apply_prepared(values)


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_becomes_infinite_while_it_comes_is_noticed_when_it_is_there(
    name: str, is_refused: bool
) -> None:
    """And what is dropped, because it was refused, does nothing to those that come after it."""
    pair = Pair(name, "mapped")
    shard, values = pair.shard, Values(1)
    shard.lr = 1e38
    shard.storage.fill({"w": -3.39e38 * np.sign(values._sent)}, None)
    shard.commit({})
    before = snapshot(shard)
    values.come(shard, SIZE - 7)
    assert snapshot(shard) == before
    if is_refused:
        shard.lr = 1e-3
        shard.apply(dense(2, SIZE))
        return
    with pytest.raises(Diverged):
        shard.apply(values.whole())


def test_initial_values_that_are_set_meanwhile_are_what_is_updated(pair: Pair) -> None:
    values = Values(1)
    values.come(pair.shard, SIZE // 2)
    for each in (pair.plain, pair.shard):
        each.storage.fill({"w": np.linspace(2, 5, SIZE, dtype=np.float32)}, None)
        each.commit({})
    values.come(pair.shard, SIZE - 7)
    pair.apply_prepared(values)


def test_a_state_that_moves_meanwhile_goes_on(name: str) -> None:
    pair = Pair(name, "mapped")
    values = Values(1)
    values.come(pair.shard, SIZE // 2)
    storage = pair.shard.storage
    assert isinstance(storage, Mapped)
    storage.move(bytearray(storage.size_bytes))
    values.come(pair.shard, SIZE - 7)
    pair.apply_prepared(values)


class Waiting:
    """A rule that begins in two threads, and goes on when it is let."""

    def __init__(self) -> None:
        self.are_at_work, self.may_go_on = threading.Event(), threading.Event()
        self._begun, self._done = itertools.count(1), itertools.count(0)

    def __call__(self, blocks: Iterable[Block]) -> None:
        if next(self._begun) == 2:
            self.are_at_work.set()
        assert self.may_go_on.wait(10)
        for _ in blocks:
            next(self._done)

    @property
    def ended(self) -> int:
        return next(self._done)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "threads", lambda: 2)
    threads._pool.cache_clear()
    yield
    threads._pool.cache_clear()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("end", "parts"), [("finish", 5), ("drop", 2)])
def test_nobody_writes_any_more_when_an_update_is_finished_or_dropped(end: str, parts: int) -> None:
    """A commit comes next, or another update into the same memory. What was not begun of one that
    is dropped never is.
    """
    rule, values = Waiting(), np.zeros(5 * threads.PART, np.float32)

    def cut(lo: int, hi: int) -> Iterator[Block]:
        for at in range(lo, hi, threads.PART):
            yield Block.in_place(BlockPlace(at), values, values[at : at + threads.PART], ())

    ahead = Ahead(Delta(values), cut, rule)
    for part in (1, 2, 3, 4):
        ahead.come(part * threads.PART)
    assert rule.are_at_work.wait(10), "other threads do it"
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(getattr(ahead, end))
        with pytest.raises(TimeoutError):
            ended.result(0.05)
        rule.may_go_on.set()
        ended.result(10)
    assert rule.ended == parts


def test_a_state_that_is_closed_meanwhile_is_written_by_nobody_any_more(name: str) -> None:
    pair = Pair(name, "mapped")
    storage = pair.shard.storage
    assert isinstance(storage, Mapped)
    Values(1).come(pair.shard, SIZE // 2)
    storage.close()
    assert storage._ahead is None
    pair.check()


@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf, 1e30])
def test_a_prepared_push_is_checked_without_a_pass_of_its_own(name: str, poison: float) -> None:
    shard, values = Pair(name, "mapped").shard, Values(1)
    values._sent[SIZE - 1] = poison
    for count in (0, 1, 500, SIZE - 1):
        values.come(shard, count)
    delta = values.whole()
    assert shard.storage.prepared_squares(Delta(delta.values.copy())) is None
    squares = shard.storage.prepared_squares(delta)
    if shard.prepare(delta.values, SIZE, is_new=False):
        assert squares == pytest.approx(squared_norm(delta.values), rel=1e-4, nan_ok=True)
    else:
        assert squares is None
    assert shard.is_shorter(delta, 1e9) == (poison == 0.0)
    norm = euclidean_norm(delta.values)
    assert shard.is_shorter(delta, norm) == (poison == 0.0)
    assert not shard.is_shorter(delta, float(np.nextafter(norm, 0)))


def test_what_fails_while_values_come_fails_their_update() -> None:
    def rule(blocks: Iterable[Block]) -> None:
        raise ValueError("a bug")

    def update() -> None:
        ahead = Ahead(Delta(np.zeros(threads.PART, np.float32)), lambda lo, hi: iter([]), rule)
        ahead.come(threads.PART)
        ahead.finish()

    with pytest.raises(ValueError, match="a bug"):
        update()


@pytest.mark.per_commit(2)
def test_large_updates_come_to_the_same_in_several_threads(name: str) -> None:
    size = 3 * threads.PART + 17
    pair = Pair(name, "mapped", size)
    for seed in range(2):
        dropped, prepared = Values(seed, size), Values(seed + 10, size)
        for part in (1, 2, 3):
            dropped.come(pair.shard, part * threads.PART)
        pair.apply_prepared(Values(seed + 20, size))
        for part in (1, 2, 3):
            prepared.come(pair.shard, part * threads.PART)
        pair.apply_prepared(prepared)
        pair.apply_prepared(dropped)


def test_an_update_that_was_given_up_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers on slow links it would be done anew with every push of the fast ones."""
    pair, begun = Pair("adagrad", "mapped"), []
    monkeypatch.setattr(
        pair.shard, "_next_rule", lambda: begun.append(1) or pair.shard.optimizer._step
    )
    slow, fast = Values(1), Values(2)
    slow.come(pair.shard, 100)
    for count in (200, 300):
        fast.come(pair.shard, count)
    pair.apply_prepared(fast)
    slow.come(pair.shard, 1000)
    pair.apply_prepared(slow)
    assert len(begun) == 1
