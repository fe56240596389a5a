"""Split learning as state machines: a batch is in a shard once, the head remembers its answers, and
clients take turns."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import site

from dlctl.algorithms.methods import split
from dlctl.algorithms.methods.split import SPLIT, BatchKey, Options
from dlctl.algorithms.needs import Engine, Need, Read, Receipt, Write
from dlctl.compress.base import Delta
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import Choice, Job, JobFile, Party, Schedule, Workers
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.memory import in_memory
from dlctl.wire.messages import APPLIED, BUFFERED, HELD, LATE, REFUSED, Array, Packed, Push

SIZE, HEAD = 3, 2


def side_of(clients: str = "turn") -> Any:
    options = Options(clients=clients)
    shard = in_memory(SGD(SGDOptions(lr=1.0)), np.zeros(SIZE, np.float32))
    return SPLIT.shard.of(options)(options, shard)


def push(side: Any, batch: BatchKey | None, slot: int = HEAD, clock: int = 0) -> str:
    """One of the head, unless it says whose."""
    packed = Packed("none", SIZE, (np.ones(SIZE, np.float32),))
    part = 0
    if batch is not None:
        clock = split.clock_of(batch.data_epoch, batch.portion)
        part = split.part_of(batch.number, batch.slot)
    message = Push(slot, 1, 1, 0, 0, 0, 0, 8, clock, packed, part)
    return side.push(message, Delta(packed.arrays[0]))[0].kind


# ---------------------------------------------------------------- servers


@pytest.mark.parametrize("clients", ["turn", "parallel"])
def test_a_batch_is_in_the_shard_once_whoever_asked_for_it(clients):
    side = side_of(clients)
    first = [BatchKey(0, 4, number, 0) for number in range(3)]
    assert [push(side, batch) for batch in first] == [APPLIED] * 3
    # The client dies; its slot begins another portion before this one is leased to slot 1.
    assert push(side, BatchKey(0, 5, 0, 0)) == APPLIED
    again = [BatchKey(0, 4, number, 1) for number in range(4)]
    assert [push(side, batch) for batch in again] == [LATE, LATE, LATE, APPLIED]
    assert side.shard.version == 5
    assert push(side, BatchKey(1, 4, 0, 0)) == APPLIED, "another epoch has that portion, too"


@pytest.mark.parametrize("clients", ["turn", "parallel"])
@pytest.mark.parametrize("restores", [False, True])
def test_the_next_server_knows_what_is_in_the_shard(clients, restores):
    side = side_of(clients)
    for number in range(3):
        push(side, BatchKey(0, 4, number, 0))
    other = side_of(clients)
    state = json.loads(json.dumps(side.state()))
    (other.restore if restores else other.resume)(state)
    assert push(other, BatchKey(0, 4, 2, 1)) == LATE
    assert push(other, BatchKey(0, 4, 3, 1)) == APPLIED


def test_what_a_server_remembers_does_not_grow():
    side = side_of()
    for portion in range(200):
        push(side, BatchKey(0, portion, 0, portion % 2))
    assert len(json.dumps(side.state())) < 80


def test_in_turn_a_push_says_which_batch_it_is():
    assert push(side_of(), None) == REFUSED


def test_parallel_clients_are_averaged_and_the_head_does_not_wait():
    side = side_of("parallel")
    side.members(frozenset({0, 1}))
    assert push(side, None, slot=0) == HELD
    assert push(side, BatchKey(0, 0, 0, 0)) == APPLIED
    outcomes = side.push(
        Push(1, 1, 1, 0, 0, 0, 0, 8, side.shard.version, _ones(), 0), Delta(_ones().arrays[0])
    )
    assert {outcome.slot for outcome in outcomes} >= {1}


def _ones() -> Packed:
    return Packed("none", SIZE, (np.ones(SIZE, np.float32),))


# ---------------------------------------------------------------- the head


def head(shape: str = "vanilla") -> Any:
    where = site(Options(shape=shape), np.zeros(SIZE, np.float32), HEAD)
    side = SPLIT.replica(replace(where, role="head"))
    side.begin("new")
    return side


def tensor(*values: float) -> tuple[Array, Array]:
    return np.array(values, np.float32), np.array([len(values)], np.int64)


def answered(
    answer: Any, results: dict[str, tuple[Array, ...]], outcome: str = APPLIED
) -> tuple[tuple[Array, ...], list]:
    """The arrays of an answer, and the needs that it took. results: of the engine's operations.
    outcome: of each push.
    """
    needs: list[Need] = []
    if not isinstance(answer, Generator):
        return answer, needs
    value: Any = None
    while True:
        try:
            need = answer.send(value)
        except StopIteration as end:
            return end.value, needs
        needs.append(need)
        value = results[need.op] if isinstance(need, Engine) else None
        value = Receipt({1: outcome}) if isinstance(need, Write) else value


STEPPED = {"step": (*tensor(5.0), np.array([0.5]), np.ones(SIZE, np.float32))}


def test_the_head_steps_before_it_answers_and_answers_a_batch_again_from_memory():
    side = head()
    batch = BatchKey(0, 4, 2, 0)
    asked = (batch.to_array(), *tensor(1.0), *tensor(2.0))
    answer, needs = answered(side.serve("step", asked), STEPPED)
    assert [type(need) for need in needs] == [Read, Engine, Write]
    assert needs[2].wait, "an answer is not given before the step is durable"
    assert (needs[2].clock, needs[2].part) == (split.clock_of(0, 4), split.part_of(2, 0))
    assert [array.tolist() for array in answer] == [[5.0], [1], [0.5]]
    # Another client has the portion of the one that has died.
    again, needs = answered(side.serve("step", (batch._replace(slot=1).to_array(), *asked[1:])), {})
    assert not needs
    assert all(np.array_equal(a, b) for a, b in zip(again, answer, strict=True))
    assert side.figures() == {"steps": 1, "repeated": 1}


def step(side: Any, batch: BatchKey, value: float) -> tuple[float, bool]:
    """(dL/dz of the answer, whether the engine was run), where the engine answers with value."""
    results = {"step": (*tensor(value), np.array([0.5]), np.ones(SIZE, np.float32))}
    asked = (batch.to_array(), *tensor(1.0), *tensor(2.0))
    answer, needs = answered(side.serve("step", asked), results)
    return float(answer[0][0]), bool(needs)


@pytest.mark.parametrize("heir", [0, 1])
def test_a_portion_that_begins_anew_meets_the_answer_to_its_furthest_batch(heir):
    side = head()
    for number in range(4):
        step(side, BatchKey(0, 4, number, 0), number)
    # It dies; another process of its slot, or another client, has the portion.
    if heir:
        for portion in (5, 6, 7):
            step(side, BatchKey(0, 4, portion - 5, heir), 7.0)
            step(side, BatchKey(0, portion, 0, 0), 8.0)
    else:
        assert [step(side, BatchKey(0, 4, n, heir), 9.0) for n in range(3)] == [(9.0, True)] * 3
    assert step(side, BatchKey(0, 4, 3, heir), 9.0) == (3.0, False)


def test_what_the_head_remembers_does_not_grow():
    side = head()
    for portion in range(50):
        for number in range(3):
            step(side, BatchKey(0, portion, number, portion % 2), 1.0)
    assert sum(map(len, side.answered.values())) <= 6


def test_an_infinite_gradient_is_no_step():
    side = head()
    infinite = {"step": (*STEPPED["step"][:3], np.full(SIZE, np.inf, np.float32))}
    asked = (BatchKey(0, 0, 0, 0).to_array(), *tensor(1.0), *tensor(2.0))
    _, needs = answered(side.serve("step", asked), infinite)
    assert [type(need) for need in needs] == [Read, Engine]


def test_a_head_that_has_not_seen_the_first_half_asks_for_it():
    batch = BatchKey(0, 1, 0, 0).to_array()
    results = {"forward": tensor(3.0), "backward": (*tensor(7.0), np.ones(SIZE, np.float32))}
    new = head("u")
    assert new.serve("backward", (batch, *tensor(1.0))) == ()
    a, needs = answered(new.serve("forward", (batch, *tensor(1.0))), results)
    assert (a[0].tolist(), [type(need) for need in needs]) == ([3.0], [Read, Engine])
    dz, needs = answered(new.serve("backward", (batch, *tensor(2.0))), results)
    assert (dz[0].tolist(), [type(need) for need in needs]) == ([7.0], [Read, Engine, Write])
    assert needs[1].arrays[0].tolist() == [1.0], "z of the first half"


@pytest.mark.parametrize(
    ("op", "arrays"),
    [
        ("weights", ()),
        ("step", (BatchKey(0, 0, 0, 0).to_array(), *tensor(1.0))),
        ("step", (np.zeros(3, np.int64), *tensor(1.0), *tensor(1.0))),
        ("predict", (BatchKey(0, 0, 0, 0).to_array(), np.ones(2), np.array([3], np.int64))),
        ("predict", (BatchKey(0, 0, 0, 0).to_array(), np.ones(3, np.int64), np.array([3]))),
        ("predict", (-BatchKey(0, 0, 0, 1).to_array(), *tensor(1.0))),
        ("predict", (BatchKey(2**40, 0, 0, 1).to_array(), *tensor(1.0))),
        ("predict", (BatchKey(0, 0, 0, 1, 2**62).to_array(), *tensor(1.0))),
        ("predict", (BatchKey(0, 0, 0, 0).to_array(), np.ones(0), np.array([0], np.int64))),
    ],
)
def test_what_no_client_asks_is_refused(op, arrays):
    with pytest.raises(RemoteProtocolError):
        head().serve(op, arrays)


def test_a_client_answers_nothing():
    where = site(Options(), np.zeros(SIZE, np.float32), 0)
    client = SPLIT.replica(replace(where, role="client"))
    client.begin("new")
    with pytest.raises(RemoteProtocolError):
        client.serve("predict", (BatchKey(0, 0, 0, 0).to_array(), *tensor(1.0)))


# ---------------------------------------------------------------- turns


def test_one_client_works_at_a_time_and_the_next_one_follows():
    lead = SPLIT.lead(Options())
    lead.at_work = frozenset({1})
    assert "worker-1" in lead.may_lease(0, 0)
    assert lead.may_lease(1, 0), "also what it asks for ahead"
    lead.at_work = frozenset()
    assert not lead.may_lease(0, 0)
    assert lead.in_turn([2, 0, 1]) == [0, 1, 2]
    lead.portion_done(1, 8, 64, 0)
    assert lead.in_turn([2, 0, 1]) == [2, 0, 1]
    after = SPLIT.lead(Options())
    after.resume(lead.state())
    assert after.in_turn([0, 1, 2]) == [2, 0, 1]


def test_parallel_clients_do_not_wait_for_each_other_and_have_one_portion_each():
    lead = SPLIT.lead(Options(clients="parallel"))
    lead.at_work = frozenset({0, 1})
    assert not lead.may_lease(2, 0)
    # Of those ahead, a server would not know that it has the batches of all of them.
    assert "worker-1" in lead.may_lease(1, 0)


# ---------------------------------------------------------------- a head for each client


def gathering() -> Any:
    options = Options(clients="parallel", heads="each")
    optimizer = SPLIT.shard.optimizer(options, SGD(SGDOptions(lr=1.0)), 3)
    return SPLIT.shard.of(options)(options, in_memory(optimizer, np.zeros(SIZE, np.float32)))


def ends(side: Any, clock: int, part: int = split.BEGIN) -> str:
    """The head says that a step of the clients begins, or that it has seen all."""
    empty = Packed("none", SIZE, (np.zeros(0, np.float32),))
    message = Push(HEAD, 1, 1, 0, 0, 0, 0, 0, clock, empty, part)
    return side.push(message, Delta(np.zeros(SIZE, np.float32)))[0].kind


def test_the_gradients_of_a_step_are_gathered_until_the_next_one_begins():
    side = gathering()
    assert ends(side, 0) == APPLIED
    assert [push(side, BatchKey(0, portion, 0, portion)) for portion in (0, 1)] == [BUFFERED] * 2
    assert push(side, BatchKey(0, 1, 0, 0)) == LATE, "a batch is in the sum once"
    assert side.shard.w.tolist() == [0.0] * SIZE
    assert ends(side, 1) == ends(side, 1) == APPLIED
    assert side.shard.w.tolist() == [-1.0] * SIZE, "the mean, once"
    push(side, BatchKey(0, 2, 0, 0))
    side.resume(json.loads(json.dumps(side.state())))
    assert ends(side, 1) == APPLIED, "a new process of the head does not know the step"
    assert side.shard.w.tolist() == [-1.0] * SIZE
    assert ends(side, 0, split.END) == APPLIED
    assert side.shard.w.tolist() == [-2.0] * SIZE


def test_a_step_that_a_checkpoint_has_in_the_middle_is_made_once():
    side = gathering()
    ends(side, 3)
    push(side, BatchKey(0, 0, 0, 0))
    side.round = 0
    side.restore({**side.state(), "round": 3})
    assert ends(side, 3) == APPLIED, "the clients resume in it"
    assert push(side, BatchKey(0, 1, 0, 1)) == BUFFERED
    assert side.shard.w.tolist() == [0.0] * SIZE
    ends(side, 4)
    assert side.shard.w.tolist() == [-1.0] * SIZE


def test_the_head_begins_a_step_once_before_it_computes_in_it_and_ends_the_last_one():
    where = site(Options(clients="parallel", heads="each"), np.zeros(SIZE, np.float32), HEAD)
    side = SPLIT.replica(replace(where, role="head"))
    side.begin("new")
    for number in range(2):
        asked = (BatchKey(0, number, 0, 0, 7).to_array(), *tensor(1.0), *tensor(2.0))
        _, needs = answered(side.serve("step", asked), STEPPED)
        kinds = [type(need) for need in needs]
        assert kinds == [Write, Read, Engine, Write][number:]
    (last,) = side.leave()
    assert (last.part, last.vector) == (split.END, None)
    asked = (BatchKey(0, 2, 0, 0, 8).to_array(), *tensor(1.0))
    _, needs = answered(side.serve("predict", asked), {"predict": tensor(1.0)})
    assert [type(need) for need in needs] == [Read, Engine], "after the end nothing is pushed"


# ---------------------------------------------------------------- rounds of several steps


def head_of_rounds(heads: str = "each") -> Any:
    options = Options(clients="parallel", heads=heads, local_steps=4)
    side = SPLIT.replica(replace(site(options, np.ones(SIZE, np.float32), HEAD), role="head"))
    side.begin("new")
    side.own_rate = lambda samples: 0.5
    return side


def stepped(side: Any, batch: BatchKey, slope: float, samples: int = 1, kind: str = "") -> Any:
    """The push of a step along a gradient of h that is `slope` everywhere."""
    of_z = np.ones(samples, np.float32), np.array([samples], np.int64)
    found = {"step": (*of_z, np.array([0.5]), np.full(SIZE, slope, np.float32))}
    asked = (batch.to_array(), *of_z, *of_z)
    _, needs = answered(side.serve("step", asked), found, kind or BUFFERED)
    return next(need for need in needs if isinstance(need, Write) and need.samples)


def test_what_the_pushes_of_a_round_add_up_to_is_the_mean_of_the_heads_by_samples():
    side, total, samples = head_of_rounds(), 0.0, 0
    steps = [(0, 2.0, 4), (1, -1.0, 2), (0, 6.0, 3), (1, 5.0, 2)]  # (slot, gradient, samples)
    for number, (slot, slope, of) in enumerate(steps):
        push = stepped(side, BatchKey(0, slot, number, slot, 1), slope, of)
        total, samples = total + push.samples * push.vector, samples + push.samples
    ends = {slot: 1 - 0.5 * sum(slope for s, slope, _ in steps if s == slot) for slot in (0, 1)}
    assert {slot: own.h[0] for slot, own in side.own.items()} == ends
    assert 1 - total / samples == pytest.approx((7 * ends[0] + 4 * ends[1]) / 11)


@pytest.mark.parametrize("kind", [LATE, REFUSED])
def test_a_batch_that_no_server_takes_does_not_move_the_head_of_its_client(kind):
    """It was in h before, or a server refuses it."""
    side = head_of_rounds()
    stepped(side, BatchKey(0, 4, 0, 0, 1), 2.0, kind=kind)
    assert side.own[0].h.tolist() == [1.0] * SIZE
    assert side.own[0].samples == 0


def test_the_next_round_and_a_drained_head_begin_with_the_average():
    side = head_of_rounds()
    stepped(side, BatchKey(0, 4, 0, 0, 1), 2.0)
    side.parameters[:] = 3.0  # What it reads in the next round.
    push = stepped(side, BatchKey(0, 4, 1, 0, 2), 2.0)
    assert (push.vector.tolist(), side.own[0].h.tolist()) == ([1.0] * SIZE, [2.0] * SIZE)
    assert [need.part for need in side.leave()] == [split.END]
    assert not side.own


def test_one_head_pushes_its_step_as_it_is():
    side = head_of_rounds("one")
    for number in range(2):
        push = stepped(side, BatchKey(0, 4, number, 0, 1), 2.0, samples=3)
        assert push.vector.tolist() == [1.0] * SIZE
    assert not side.own


def test_rounds_need_clients_at_once_and_plain_sgd_and_average_by_default():
    options = {"clients": "parallel", "local_steps": 8}
    chosen = SPLIT.of(options)
    assert (chosen.optimizer.options, chosen.inner.name) == ({"lr": 1.0}, "sgd")
    assert SPLIT.of({}).inner.name == "none"
    chosen_inner = Choice(name="sgd", options={"lr": 0.1})
    of_rounds = Choice(name="split", options=options)
    job = replace(split_job(), algorithm=of_rounds, inner=chosen_inner)
    assert SPLIT.check(job) == []
    for inner in (Choice(name="adamw"), Choice(name="sgd", options={"momentum": 0.9})):
        assert [key for key, *_ in SPLIT.check(replace(job, inner=inner))] == [("inner", "name")]
    falling = replace(job, schedule=Schedule(kind="cosine"))
    assert [key for key, *_ in SPLIT.check(falling)] == [("schedule",)]
    in_turn = replace(job, algorithm=Choice(name="split", options={"local_steps": 8}))
    assert [key for key, *_ in SPLIT.check(in_turn)] == [("algorithm", "local_steps")]


# ---------------------------------------------------------------- what it refuses, and forgets


@pytest.mark.parametrize("clients", ["turn", "parallel"])
def test_batches_that_are_cut_otherwise_after_a_resume_are_new(clients):
    side, same, other = (side_of(clients) for _ in range(3))
    side.batches = same.batches = "2x8/0"
    other.batches = "2x16/0"
    push(side, BatchKey(0, 4, 0, 0))
    for each, expected in ((same, LATE), (other, APPLIED)):
        each.restore(json.loads(json.dumps(side.state())))
        assert push(each, BatchKey(0, 4, 0, 1)) == expected


def split_job(optimizer: str = "sgd", clients: int = 2, **options: Any) -> JobFile:
    clinic = Party(name="c", role="client", task="a", host="local", workers=clients)
    return JobFile(
        job=Job(name="s", task="a"), algorithm=Choice(name="split", options=options),
        optimizer=Choice(name=optimizer), workers=Workers(count=clients + 1),
        parties=(clinic, Party(name="h", role="head", task="b", host="local")),
    )  # fmt: skip


@pytest.mark.parametrize("clients", ["turn", "parallel"])
def test_clients_in_turn_hand_on_the_buffers(clients):
    assert SPLIT.replica.hands_on_buffers(Options(clients=clients)) == (clients == "turn")


def test_a_head_for_each_client_needs_clients_at_once_and_an_optimiser_of_means():
    both = {"clients": "parallel", "heads": "each"}
    assert SPLIT.check(replace(split_job(), algorithm=Choice(name="split", options=both))) == []
    ((key, *_),) = SPLIT.check(split_job(heads="each"))
    assert key == ("algorithm", "heads")
    muon = replace(split_job("muon"), algorithm=Choice(name="split", options=both))
    ((key, *_),) = SPLIT.check(muon)
    assert key == ("optimizer", "name")
