"""Messages that no honest peer would send now: they change nothing, and no machine falls over.

Every role is brought to the middle of a run and then gets whatever the types of the messages allow,
with names and numbers that are nearly right. Afterwards the run must end as if nothing had been.
"""

from dataclasses import fields
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
from example_counts import times
from hypothesis import Phase, given
from hypothesis import strategies as st
from simulated import ACCOUNT, job_file, ledger_checkers

from dlctl.roles.coordinator.training.dataset import Dataset
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.abuse_guard import MUTE_S, USELESS_MAX
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Simulation
from dlctl.sim.world import KEY, RUN_ID
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Exit, Mute, Received, Send
from dlctl.wire.messages import MESSAGES, Array, Json, Packed

NUMBERS = st.integers(0, 3) | st.sampled_from([7, 64, 10**6, 2**62])
WORDS = st.sampled_from(
    ["", "worker-0", "worker-1", "worker-9", "server-0", "agent-0", "none", "topk", "dot", "stop",
     "applied", "held", "gap", "fenced", RUN_ID, "ckpt/000000000000-1", "\x1b]0;\r\n", "../etc"]
)  # fmt: skip
ARRAYS = st.sampled_from(
    [np.zeros(0, "f4"), np.ones(3, "f4"), np.full(600, np.nan, "f4"), np.ones(300, "f8"),
     np.arange(9, dtype="u1"), np.full(300, 1e38, "f4")]
)  # fmt: skip
JSONS = st.dictionaries(
    st.sampled_from(
        ["names", "settings", "lr", "step", "log_level", "kill", "loss", "lo", "first", "workers"]
    ),
    st.none() | st.booleans() | st.sampled_from([np.inf, -np.inf, np.nan]) | st.integers(-1, 5)
    | WORDS | st.lists(WORDS, max_size=2)
    | st.dictionaries(WORDS, st.integers() | WORDS, max_size=2),
    max_size=3,
)  # fmt: skip
FLOATS = st.sampled_from([0.0, -1.0, np.nan, np.inf, 1e300])
VALUES = {
    str(str): WORDS,
    str(bool): st.booleans(),
    str(bytes): st.sampled_from([b"", b"x" * 32, b"[[]]", b'[["w","trained",[3],"float32",[]]]']),
    str(Json): JSONS,
    str(Array): ARRAYS,
    str(Packed): st.builds(
        Packed, WORDS, st.sampled_from([0, 3, 300]), st.lists(ARRAYS, max_size=2).map(tuple)
    ),
}


def _values(hint) -> st.SearchStrategy:
    """Further than the wire lets through: a role is no weaker than its transport."""
    if get_origin(hint) is tuple:
        return st.lists(_values(get_args(hint)[0]), max_size=3).map(tuple)
    if (limits := codec.limits_of(hint)) is None:
        return VALUES[str(hint)]
    if isinstance(limits.least, float):
        return FLOATS
    return NUMBERS if limits.least == 0 else st.integers(-3, 3)


def _any_of(kind) -> st.SearchStrategy:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, *(_values(hints[f.name]) for f in fields(kind)))


ANYTHING = st.one_of([_any_of(kind) for kind in MESSAGES.values()])
STORIES = times(0.25, phases=[Phase.generate, Phase.shrink])
SLOW_STEPS = ComputeOptions(step_s=0.05, spread=0.0)


def in_the_middle(stop_s: float = 0.9) -> Simulation:
    problem = Ledger(shards=2, samples=128, cells=300)
    job = job_file(
        workers=2, servers=2, optimizer=ACCOUNT, batch_size=8, portion_batches=2, epochs=2.0
    )
    simulation = Simulation(
        job, problem, compute=SLOW_STEPS, checkers=ledger_checkers(problem, 2, once=True)
    )
    assert simulation.run(stop_s).state == ""
    return simulation


def tell(simulation: Simulation, name: str, peer, messages) -> list:
    """Hand messages to a machine, past the network; what it would do in answer is not done."""
    process = simulation.world.process(name)
    return [
        effect
        for message in messages
        for effect in process.machine.handle(Received(peer, message), process.clock())
    ]


# ---------------------------------------------------------------- anything at all


@pytest.mark.long
@given(st.lists(ANYTHING, min_size=20, max_size=60))
@STORIES
def test_a_stranger_cannot_disturb_a_server(messages):
    """All but a Push and Join that are right in every field: those need the run's key."""
    simulation = in_the_middle()
    before = simulation.world.weights()
    effects = tell(simulation, "server-1", b"a stranger", messages)
    assert not [effect for effect in effects if isinstance(effect, Exit)]
    known = {(0, 1), (1, 1)}
    forged = [x for x in messages if (getattr(x, "slot", -1), getattr(x, "term", -1)) in known]
    assert forged or np.array_equal(simulation.world.weights(), before)
    if not forged:
        assert simulation.run().state == "finished"


@pytest.mark.long
@given(st.lists(ANYTHING, min_size=20, max_size=60))
@STORIES
def test_nothing_that_a_server_says_makes_a_worker_fall_over(messages):
    for stop_s in (0.2, 0.9):
        simulation = in_the_middle(stop_s)
        for peer in ("server-0", "server-1", "server-7"):
            fine = [x for x in messages if not isinstance(x, m.Dismiss)]
            effects = tell(simulation, "worker-1", peer, fine)
            exits = [effect for effect in effects if isinstance(effect, Exit)]
            assert not exits or any(getattr(x, "outcome", "") == "fenced" for x in fine)


@given(st.lists(ANYTHING, min_size=20, max_size=60))
@STORIES
def test_nothing_that_anybody_says_makes_the_coordinator_fall_over(messages):
    for stop_s in (0.02, 0.2, 0.9):
        simulation = in_the_middle(stop_s)
        worker = simulation.world.machine(COORDINATOR).members.daemons["worker-0"]
        for peer in (b"a stranger", worker.peer or b"nobody yet"):
            tell(simulation, COORDINATOR, peer, messages)


@given(st.lists(ANYTHING, min_size=20, max_size=60))
@STORIES
def test_an_agent_takes_no_orders_that_make_no_sense(messages):
    simulation = in_the_middle()
    fine = [x for x in messages if not isinstance(x, m.Shutdown | m.Dismiss)]
    effects = tell(simulation, "agent-0", COORDINATOR, fine)
    assert not [effect for effect in effects if isinstance(effect, Exit)]


# ---------------------------------------------------------------- an authorised worker that lies


def _refused(effects) -> list[str]:
    acks = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, m.Ack)]
    assert {ack.outcome for ack in acks} <= {"refused"}
    return [ack.reason for ack in acks]


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (Packed("none", 300, (np.full(300, np.nan, "f4"),)), "not finite"),
        (Packed("none", 300, (np.full(300, -np.inf, "f4"),)), "not finite"),
        (Packed("none", 300, (np.full(300, 1e30, "f4"),)), "norm"),
        (Packed("none", 300, (np.ones(299, "f4"),)), "299 values"),
        (Packed("none", 299, (np.ones(299, "f4"),)), "this shard has 300"),
        (Packed("none", 300, (np.ones(300, "f8"),)), "values of 32 or 16 bits"),
        (Packed("none", 300, ()), "1 arrays, not 0"),
        (Packed("topk", 300, (np.ones(1, "f4"), np.ones(1, "u1"))), 'compressed with "topk"'),
        (Packed("os.system", 300, (np.ones(300, "f4"),)), 'compressed with "os.system"'),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_a_server_refuses_a_poisoned_push_and_says_why(delta, reason):
    simulation = in_the_middle()
    server = simulation.world.machine("server-0").serving
    before = server.shard.w.copy()
    push = m.Push(0, 1, 1, server.parameters.dedup.next_seq(0), 0, 0, 0, 8, 0, delta, 0)
    join = m.Join(RUN_ID, 0, 1, sign(KEY, RUN_ID, 0, 1))
    (answer,) = _refused(tell(simulation, "server-0", b"a worker that lies", [join, push]))
    assert reason in answer
    assert np.array_equal(server.shard.w, before)
    assert server.rates.total["refused"] == 1


def test_an_epoch_that_the_coordinator_has_not_issued_fences_nobody():
    simulation = in_the_middle()
    forged = m.Join(RUN_ID, 0, 99, sign(b"another key", RUN_ID, 0, 99))
    other_run = m.Join("another-run", 0, 99, sign(KEY, "another-run", 0, 99))
    replayed = m.Join(RUN_ID, 1, 2, sign(KEY, RUN_ID, 0, 2))
    effects = tell(simulation, "server-0", b"a stranger", [forged, other_run, replayed])
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    assert [type(message) for message in sent] == [m.Dismiss]
    assert simulation.run().state == "finished"


def test_who_has_not_shown_a_token_on_a_connection_gets_nothing_in_and_nothing_out():
    """Not even with the slot, both terms and the next number of a worker that lives."""
    simulation = in_the_middle()
    server = simulation.world.machine("server-0").serving
    before = server.shard.w.copy()
    delta = Packed("none", 300, (np.ones(300, "f4"),))
    forged = [
        m.Push(0, 1, 1, server.parameters.dedup.next_seq(0), 0, 0, 0, 8, 0, delta, 0),
        m.Push(0, 1, 1, 0, 0, 0, 0, 8, 0, delta, 0),
        m.Fetch(0, 1, 7, 0),
        m.Initialise(0, 1, np.ones(300, "f4"), np.zeros(0)),
    ]
    effects = tell(simulation, "server-0", b"a stranger", forged)
    replies = [effect.message for effect in effects if isinstance(effect, Send)]
    assert replies == [m.JoinAgain(0, 1)] * len(forged)
    assert np.array_equal(server.shard.w, before)
    assert simulation.run().state == "finished"


def test_who_comes_with_the_name_of_another_run_is_sent_away():
    """A worker that was frozen while its run was removed, and another one has its ports now."""
    simulation = in_the_middle()
    token = sign(KEY, "another-0000", 0, 1)
    register = m.Register("another-0000", "worker", "worker-0", 1, 1, "host", "0")
    for name, message in (
        ("server-0", m.Join("another-0000", 0, 1, token)),
        ("coordinator", register),
    ):
        effects = tell(simulation, name, b"of another run", [message])
        (reply,) = [e.message for e in effects if isinstance(e, Send)]
        assert isinstance(reply, m.Dismiss), "that makes it exit with 75"
    assert simulation.run().state == "finished"


def test_a_push_that_was_recorded_and_is_played_again_is_a_duplicate():
    simulation = in_the_middle()
    server = simulation.world.machine("server-0").serving
    before = server.shard.w.copy()
    old = m.Push(0, 1, 1, 0, 0, 0, 0, 8, 0, Packed("none", 300, (np.ones(300, "f4"),)), 0)
    join = m.Join(RUN_ID, 0, 1, sign(KEY, RUN_ID, 0, 1))
    effects = tell(simulation, "server-0", b"who has heard it all", [join, *[old] * 1000])
    answers = [e.message for e in effects if isinstance(e, Send)]
    assert {answer.outcome for answer in answers[1:]} == {"duplicate"}
    assert np.array_equal(server.shard.w, before)


@pytest.mark.parametrize(
    ("verb", "key"), [("status", "first"), ("scale", "workers"), ("stop", "grace_s")]
)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, "one", [], None])
def test_a_number_that_is_none_is_refused_and_the_coordinator_lives(verb, key, value):
    simulation = in_the_middle()
    request = m.Request(1, verb, {key: value})
    effects = tell(simulation, COORDINATOR, b"a client", [request])
    (*_, reply) = [e.message for e in effects if isinstance(e, Send) and type(e.message) is m.Reply]
    assert reply.done
    assert "not valid" in reply.error
    assert simulation.run().state == "finished"


def test_who_plays_one_push_again_and_again_is_not_heard_for_a_moment():
    simulation = in_the_middle()
    old = m.Push(0, 1, 1, 0, 0, 0, 0, 8, 0, Packed("none", 300, (np.ones(300, "f4"),)), 0)
    join = m.Join(RUN_ID, 0, 1, sign(KEY, RUN_ID, 0, 1))
    process = simulation.world.process("server-0")
    effects = [
        effect
        for message in [join, *[old] * USELESS_MAX]
        for effect in process.machine.handle(
            Received(b"worker-0", message, "worker-0"), process.clock()
        )
    ]
    assert Mute("worker-0", MUTE_S) in effects


def test_a_push_from_the_future_is_a_gap_and_one_of_an_older_epoch_is_fenced():
    simulation = in_the_middle()
    delta = Packed("none", 300, (np.ones(300, "f4"),))
    joins = [
        m.Join(RUN_ID, slot, term, sign(KEY, RUN_ID, slot, term)) for slot, term in ((0, 1), (1, 2))
    ]
    tell(simulation, "server-0", b"x", joins)
    ahead = m.Push(0, 1, 1, 2**62, 0, 0, 0, 8, 0, delta, 0)
    older = m.Push(1, 1, 1, 3, 0, 0, 0, 8, 0, delta, 0)
    unknown = m.Push(1, 3, 1, 0, 0, 0, 0, 8, 0, delta, 0)
    stranger = m.Push(9, 1, 1, 0, 0, 0, 0, 8, 0, delta, 0)
    effects = tell(simulation, "server-0", b"x", [ahead, older, unknown, stranger])
    answers = [effect.message for effect in effects if isinstance(effect, Send)]
    assert [answer.outcome for answer in answers[:2]] == ["gap", "fenced"]
    assert answers[2:] == [m.JoinAgain(0, 1)] * 2


def test_nobody_but_the_coordinator_gives_orders_to_a_server():
    simulation = in_the_middle()
    orders = [
        m.Shutdown("now"), m.Dismiss("go"), m.ChangeSettings(1, {"lr": 1e9}), m.Members((7,)),
        m.VectorOp(1, ("copy",), ("w",), ("w",), (0.0,)), m.Save(9, "elsewhere"),
        m.Assign((0, 3), b"", ""),
    ]  # fmt: skip
    effects = tell(simulation, "server-0", b"a stranger", orders)
    assert {type(effect).__name__ for effect in effects} == {"Note"}
    assert simulation.run().state == "finished"


@pytest.mark.parametrize(
    ("limit", "portions"),
    [({"steps": 1000}, 250), ({"samples": 10**6}, 31250), ({"epochs": 1.0}, 2**62 // 32)],
)
def test_a_dataset_that_nobody_can_go_through_is_cut_at_once(limit, portions):
    job = job_file(workers=2, optimizer=ACCOUNT, batch_size=8, portion_batches=4, **limit)
    simulation = Simulation(job, Ledger(shards=1, samples=128, cells=300))
    simulation.run(0.02)
    data = simulation.world.machine(COORDINATOR).data
    data.open_dataset(Dataset(2**62))
    assert data.pool.limit == portions
