"""A fetch of what has changed leaves the very model that a fetch of everything would have left: the
shard's values, or what all workers see of them in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import client, identity, serving, site
from example_counts import times
from hypothesis import given
from hypothesis import strategies as st

from dlctl.algorithms.base import Arrival
from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.compress import indices
from dlctl.compress.base import Delta
from dlctl.compress.topk import TopK
from dlctl.compress.values import Precision, as_float32
from dlctl.errors import RemoteProtocolError
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.optim.sgd import SGD
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.meters import Rates
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.shard_protocol import ShardProtocol
from dlctl.roles.worker.fetching import Fetched, Fetcher
from dlctl.roles.worker.received_slice import Slice, slice_in
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.shards.memory import in_memory
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Send
from dlctl.wire.messages import Array

SIZE, RUN, KEY = 64, "run-1", b"the key"
LAYOUT = Layout((TensorEntry("w", TRAINED, (SIZE,), "float32"),)).to_bytes()
Key = tuple[int, int]
"""(term, version)"""


LAST_BITS = {"float32": 0.0, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""Twice the last bit, relative to a number."""
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16")


def server_of(w: Array, version: int, term: int, precision: Precision = "float32") -> ShardProtocol:
    """A server at work that has just taken charge of these values."""
    shard = in_memory(SGD(SGD.Options(lr=0.5)), w.copy())
    shard.version = version
    side = DOWNPOUR.shard(DOWNPOUR.Options(), shard)
    return serving(
        shard, side, m.Assign((0, SIZE), LAYOUT, ""), term=term,
        compressor=("topk", TopK), fetch_values=precision, run_id=RUN, key=KEY,
    )  # fmt: skip


class World:
    """A shard, the one worker of it, and a bad link between them."""

    def __init__(self, precision: Precision = "float32") -> None:
        self.precision: Precision = precision
        self.serving = server_of(np.zeros(SIZE, np.float32), 0, 1, precision)
        self.states: dict[Key, Array] = {}
        """All that the shard has ever been."""
        self.seen: dict[Key, Array] = {}
        """What it has told workers of that, to train with."""
        self.up: list[m.Message] = []
        self.down: list[m.Message] = []
        self.now = 0.0
        self.term = 0
        self.sparse = 0
        """Slices of changes that came into the model."""
        self.note_state()
        self.restart_worker()

    # ------------------------------------------------------------ the shard

    @property
    def key(self) -> Key:
        return self.serving.term, self.serving.shard.version

    def note_state(self) -> None:
        self.states[self.key] = self.serving.shard.w.copy()

    def push(self, random: np.random.Generator, *, dense: bool = False) -> None:
        count = SIZE if dense else int(random.integers(0, 4))
        where = None if dense else np.sort(random.choice(SIZE, count, replace=False))
        packed = None if where is None or count % 2 else indices.pack(where, SIZE)
        self.serving.shard.apply(Delta(random.standard_normal(count).astype("f4"), where, packed))
        self.note_state()

    def restart_server(self, random: np.random.Generator, *, kept: bool) -> None:
        """It goes on where it was, or from a checkpoint of some time before."""
        keys = sorted(self.states)
        term, version = self.key if kept else keys[random.integers(len(keys))]
        w = self.states[term, version]
        self.serving = server_of(w, version, self.serving.term + 1, self.precision)
        self.note_state()
        self.join()

    # ------------------------------------------------------------ the worker

    def restart_worker(self) -> None:
        self.term += 1
        self.context = Context(1.0)
        me = identity(0, self.term, sign(KEY, RUN, 0, self.term), RUN)
        self.channel = client(self.context, me, hi=SIZE)
        self.send_queue = SendQueue(self.context.retries)
        self.fetcher = Fetcher([[self.channel]], self.send_queue, Rates("fetch_bytes"))
        self.fetcher.placed = self.placed
        self.model = np.zeros(SIZE, np.float32)
        self.training: Fetched | None = None
        self.evaluations: list[Fetched] = []
        self.steps_itself(True)
        self.join()

    def join(self) -> None:
        """Nothing goes wrong here: other tests see to that."""
        self.channel.link.join(self.now)
        (asked,) = self.context.clear()
        assert isinstance(asked, Send)
        join = asked.message
        assert isinstance(join, m.Join)
        self.serving.on_join(b"worker", join)
        (joined,) = self.answers()
        assert isinstance(joined, m.Joined)
        self.channel.link.on_joined(joined, self.now)

    def answers(self) -> list[m.Message]:
        """As the transport gets them: it copies what is lent to it."""
        sent = [e.message for e in self.serving.context.clear() if isinstance(e, Send)]
        return [
            replace(a, values=a.values.copy()) if isinstance(a, m.Parameters) else a for a in sent
        ]

    def steps_itself(self, changes: bool) -> None:
        self.changes = changes
        self.fetcher.model_changes(changes)

    def local_step(self, random: np.random.Generator) -> None:
        if self.changes:
            self.model -= random.standard_normal(SIZE).astype("f4")

    def fetch(self) -> None:
        self.training = self.training or self.fetcher.start(0)
        self.flush()

    def evaluate(self) -> None:
        self.evaluations.append(self.fetcher.start(0, whole=True))
        self.flush()

    def flush(self) -> None:
        self.up += [send.message for send in self.send_queue.flush(self.now)]

    def time_passes(self) -> None:
        self.now += 20.0
        self.up += [send.message for send in self.context.retries.due(self.now)]

    # ------------------------------------------------------------ the link

    def arrive_up(self, number: int, *, again: bool = False) -> None:
        if self.up:
            number %= len(self.up)
            message = self.up[number] if again else self.up.pop(number)
            assert isinstance(message, m.Fetch)
            self.serving.on_fetch(b"worker", message)
            answers = [a for a in self.answers() if not isinstance(a, m.JoinAgain)]
            self.down += answers
            if answers and not message.exact:
                self.note_seen()

    def arrive_down(self, number: int, *, again: bool = False) -> None:
        if self.down:
            number %= len(self.down)
            message = self.down[number] if again else self.down.pop(number)
            assert isinstance(message, m.Parameters | m.SparseParameters)
            self.fetcher.on_parameters(message, self.now)

    def note_seen(self) -> None:
        """It is the same for whoever asks for this version, and close to what is there."""
        seen = as_float32(self.serving.parameters.summary.of(self.serving.shard)).copy()
        assert np.array_equal(self.seen.setdefault(self.key, seen), seen)
        w = self.serving.shard.w
        largest = max(float(np.abs(state).max()) for state in self.states.values())
        assert np.abs(seen - w).max() <= LAST_BITS[self.precision] * largest

    def place(self) -> None:
        if self.training is not None:
            self.fetcher.place(self.training, self.model, Arrival())
            self.flush()
            if self.training.complete:
                self.training = None
        for fetched in [e for e in self.evaluations if e.complete]:
            of = fetched.slices[0]
            seen = self.fetcher.assemble(fetched, None)
            assert np.array_equal(seen, self.states[of.term, of.version])
            self.evaluations.remove(fetched)

    def placed(self, channel: ShardClient, arrived: Slice, model: Array) -> None:
        self.sparse += arrived.where is not None
        assert channel.basis.version == arrived.version
        assert np.array_equal(model, self.seen[arrived.term, arrived.version])


STEPS: dict[str, Callable[[World, np.random.Generator], None]] = {
    "push": lambda world, random: world.push(random),
    "push dense": lambda world, random: world.push(random, dense=True),
    "fetch": lambda world, random: world.fetch(),
    "evaluate": lambda world, random: world.evaluate(),
    "arrive up": lambda world, random: world.arrive_up(0),
    "arrive down": lambda world, random: world.arrive_down(0),
    "overtake up": lambda world, random: world.arrive_up(-1),
    "overtake down": lambda world, random: world.arrive_down(-1),
    "repeat up": lambda world, random: world.arrive_up(0, again=True),
    "repeat down": lambda world, random: world.arrive_down(0, again=True),
    "lose up": lambda world, random: world.up.clear(),
    "lose down": lambda world, random: world.down.clear(),
    "time": lambda world, random: world.time_passes(),
    "place": lambda world, random: world.place(),
    "local step": lambda world, random: world.local_step(random),
    "steps itself": lambda world, random: world.steps_itself(True),
    "stands still": lambda world, random: world.steps_itself(False),
    "server dies": lambda world, random: world.restart_server(random, kept=True),
    "server goes back": lambda world, random: world.restart_server(random, kept=False),
    "worker dies": lambda world, random: world.restart_worker(),
}
ROUND = ("push", "fetch", "arrive up", "arrive down", "place", "local step")
"""What mostly happens."""


def run(steps: list[str], seed: int, precision: Precision = "float32") -> World:
    world, random = World(precision), np.random.default_rng(seed)
    for step in steps:
        STEPS[step](world, random)
    for _ in range(6):  # From now on nothing is lost, and nobody dies.
        world.fetch()
        world.time_passes()
        while world.up or world.down:
            world.arrive_up(0)
            world.arrive_down(0)
        world.place()
    assert world.training is None
    assert np.array_equal(world.model, world.seen[world.key]), "in the end it is up to date"
    return world


@times(3)
@given(
    st.lists(
        st.one_of(st.just(ROUND), st.sampled_from(sorted(STEPS)).map(lambda step: (step,))),
        max_size=40,
    ),
    st.integers(0, 2**32 - 1),
    st.sampled_from(PRECISIONS),
)
def test_whatever_happens_the_model_is_what_the_shard_was(
    parts: list[tuple[str, ...]], seed: int, precision: Precision
) -> None:
    run([step for part in parts for step in part], seed, precision)


@pytest.mark.per_commit(15)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_of_a_long_history_most_fetches_are_of_changes(seed: int, precision: Precision) -> None:
    """Drawn so that what goes wrong is rare; hypothesis above looks for what is nasty."""
    random = np.random.default_rng(seed)
    steps = []
    for step in ROUND * 120:
        steps.append(step)
        if random.random() < 0.05:
            steps.append(str(random.choice(sorted(STEPS))))
    assert run(steps, seed, precision).sparse > 30


# ---------------------------------------------------------------- one after the other


@pytest.fixture
def world() -> World:
    return World()


def fetch(world: World) -> m.Message:
    """One fetch without trouble; what was answered."""
    world.fetch()
    world.arrive_up(0)
    (answer,) = world.down
    world.arrive_down(0)
    world.place()
    return answer


def begin(world: World) -> np.random.Generator:
    """The shard has pushes behind it, and the worker what it may bring up to date."""
    random = np.random.default_rng(0)
    world.push(random)
    assert isinstance(fetch(world), m.Parameters)
    return random


def test_after_the_first_whole_slice_only_changes_travel(world: World) -> None:
    random = begin(world)
    for _ in range(5):
        world.push(random)
        world.local_step(random)
        assert isinstance(fetch(world), m.SparseParameters)
        assert np.array_equal(world.model, world.serving.shard.w)


def test_a_worker_without_steps_of_its_own_keeps_no_copy(world: World) -> None:
    world.steps_itself(False)
    random = begin(world)
    assert vars(world.channel.basis)["_values"] is None
    world.push(random)
    assert isinstance(fetch(world), m.SparseParameters)
    world.steps_itself(True)
    world.local_step(random)
    assert isinstance(fetch(world), m.Parameters), "what came is not at hand any more"
    assert isinstance(fetch(world), m.SparseParameters)
    world.steps_itself(False)
    world.local_step(random)
    assert isinstance(fetch(world), m.SparseParameters)
    assert vars(world.channel.basis)["_values"] is None


def test_with_dense_pushes_no_copy_is_kept_and_everything_travels(world: World) -> None:
    random = np.random.default_rng(0)
    for _ in range(3):
        world.push(random, dense=True)
        answer = fetch(world)
        assert isinstance(answer, m.Parameters)
        assert not answer.remembered
        assert vars(world.channel.basis)["_values"] is None


def test_a_server_that_has_come_back_sends_everything_once(world: World) -> None:
    random = begin(world)
    world.restart_server(random, kept=True)
    world.push(random)
    assert isinstance(fetch(world), m.Parameters)
    world.push(random)
    assert isinstance(fetch(world), m.SparseParameters)


def test_changes_of_another_base_are_not_used_and_everything_is_asked_for(world: World) -> None:
    """Nothing in a run brings this about: here the model is taken to another version by hand."""
    random = begin(world)
    world.push(random)
    world.fetch()
    world.arrive_up(0)
    world.arrive_down(0)
    world.channel.basis.version += 1
    before = world.model.copy()
    world.place()
    assert np.array_equal(world.model, before)
    (again,) = world.up
    assert isinstance(again, m.Fetch)
    assert again.have_term == 0
    world.arrive_up(0)
    world.arrive_down(0)
    world.place()
    assert world.training is None
    assert np.array_equal(world.model, world.serving.shard.w)


def sparse_answer(world: World) -> m.SparseParameters:
    """On its way."""
    world.push(begin(world))
    world.fetch()
    world.arrive_up(0)
    (answer,) = world.down
    assert isinstance(answer, m.SparseParameters)
    return answer


@pytest.mark.parametrize("wrong", [{"since": 0}, {"term": 2}])
def test_an_answer_to_something_else_than_was_asked_is_dropped(
    world: World, wrong: dict[str, int]
) -> None:
    world.fetcher.on_parameters(replace(sparse_answer(world), **wrong), 0.0)  # type: ignore[arg-type]
    assert not world.training.slices  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wrong",
    [
        {"values": np.zeros(3)},
        {"values": np.zeros(0, np.float32)},
        {"values": np.zeros(SIZE + 1, np.float32)},
        {"positions": np.zeros(0, np.uint8)},
        {"positions": np.zeros(200, np.uint8)},
        {"positions": np.full(8, 255, np.uint8)},
        {"positions": np.zeros(2, np.float32)},
        {"counts": ()},
        {"counts": (1,)},
        {"counts": (SIZE + 1,)},
        {"counts": (2**60, 1)},
        {"counts": (2**60,), "lengths": (0,)},
        {"lengths": ()},
        {"lengths": (0,)},
        {"lengths": (1, 1)},
        {"lengths": (2**60,)},
    ],
    ids=lambda wrong: (
        f"{[(name, getattr(value, 'dtype', value)) for name, value in wrong.items()]}"
    ),
)
def test_an_answer_that_does_not_fit_is_refused_and_still_waited_for(
    world: World, wrong: dict[str, Any]
) -> None:
    answer = sparse_answer(world)
    assert answer.values.size
    with pytest.raises(RemoteProtocolError):
        world.fetcher.on_parameters(replace(answer, **wrong), 0.0)
    world.arrive_down(0)
    world.place()
    assert np.array_equal(world.model, world.serving.shard.w)


def test_a_fetch_is_charged_for_what_it_brings(world: World) -> None:
    limiter = world.send_queue.limiters["fetch"]
    limiter.bytes_per_s = 4.0 * SIZE  # A whole slice takes a second.
    random = begin(world)
    assert limiter.free_at == 1.0
    world.now = 10.0
    world.push(random)
    answer = fetch(world)
    assert isinstance(answer, m.SparseParameters)
    nbytes = answer.values.nbytes + answer.positions.nbytes
    assert limiter.free_at == pytest.approx(10.0 + nbytes / (4 * SIZE))
    assert world.fetcher.rates.total["fetch_bytes"] == 4 * SIZE + nbytes
    assert world.serving.rates.total["fetch_bytes"] == 4 * SIZE + nbytes


# ---------------------------------------------------------------- in 16 bits


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_both_kinds_of_answers_take_two_bytes_a_value_and_are_counted_so(
    precision: Precision,
) -> None:
    world = World(precision)
    random = begin(world)
    world.push(random)
    answer = fetch(world)
    assert isinstance(answer, m.SparseParameters)
    assert answer.values.itemsize == 2
    nbytes = answer.values.nbytes + answer.positions.nbytes
    assert world.fetcher.rates.total["fetch_bytes"] == 2 * SIZE + nbytes
    assert world.serving.rates.total["fetch_bytes"] == 2 * SIZE + nbytes


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_repeated_fetch_is_answered_with_the_same_bytes(precision: Precision) -> None:
    world = World(precision)
    world.push(begin(world))
    world.fetch()
    for _ in range(3):
        world.arrive_up(0, again=True)
    first, *others = [codec.encode(answer) for answer in world.down]
    assert len(others) == 2
    assert all(list(map(bytes, other)) == list(map(bytes, first)) for other in others)


def test_an_evaluation_is_of_the_parameters_themselves_and_changes_nothing_for_the_others() -> None:
    world = World("bfloat16")
    world.push(begin(world))
    world.evaluate()
    world.arrive_up(0)
    (answer,) = world.down
    assert isinstance(answer, m.Parameters)
    assert np.array_equal(answer.values, world.serving.shard.w)
    assert answer.values.dtype == np.float32
    world.arrive_down(0)
    world.place()
    assert not world.evaluations
    assert isinstance(fetch(world), m.SparseParameters)


def test_a_parameter_too_large_for_float16_makes_the_shard_send_float32_from_then_on() -> None:
    world = World("float16")
    random = begin(world)
    one = np.array([5])
    world.serving.shard.apply(Delta(np.array([-2 * 65536.0], np.float32), one))
    world.note_state()
    answer = fetch(world)
    assert isinstance(answer, m.Parameters), "changes would be put on rounded values"
    assert answer.values.dtype == np.float32
    assert np.array_equal(world.model, world.serving.shard.w)
    assert world.model[5] >= 65536.0
    world.push(random)
    assert isinstance(fetch(world), m.Parameters)
    world.push(random)
    answer = fetch(world)
    assert isinstance(answer, m.SparseParameters)
    assert answer.values.dtype == np.float32
    assert np.array_equal(world.model, world.serving.shard.w)


@pytest.mark.parametrize("dtype", ["float16", "uint16"])
def test_an_answer_says_itself_how_its_values_are_written(world: World, dtype: str) -> None:
    """A server decides: whoever sent other values than it should could as well send wrong ones."""
    answer = sparse_answer(world)
    (answer,) = [replace(answer, values=np.full(answer.values.size, 1.0).astype(dtype))]
    expected = as_float32(answer.values)
    arrived = slice_in(answer, SIZE)
    assert arrived.values.dtype == np.float32
    assert np.array_equal(arrived.values, expected)


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8", "uint32"])
def test_no_other_type_is_taken_for_parameters(dtype: str) -> None:
    with pytest.raises(RemoteProtocolError):
        slice_in(m.Parameters(0, 1, 1, 1, np.zeros(SIZE, dtype)), SIZE)


@pytest.mark.parametrize("has_inner", [False, True])
def test_downpour_changes_the_model_if_it_has_an_optimiser_of_its_own(has_inner: bool) -> None:
    of = site(DOWNPOUR.Options(), np.zeros(2, np.float32), has_inner=has_inner)
    assert DOWNPOUR.replica(of).changes_parameters() == has_inner
