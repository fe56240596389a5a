"""Both ends of the exactly-once protocol: what a shard takes, and what a worker sends again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from builders import client, joined
from hypothesis import given
from hypothesis import strategies as st

from dlctl.roles.protocol.context import EXIT_FENCED, Context
from dlctl.roles.protocol.limits import REACH
from dlctl.roles.protocol.token import is_genuine, sign
from dlctl.roles.server.dedup import HELD_REACH, NEW, UNKNOWN, Dedup
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.shard_client import WINDOW
from dlctl.wire.machine import Exit, Send
from dlctl.wire.messages import (
    APPLIED,
    DUPLICATE,
    FENCED,
    GAP,
    HELD,
    LATE,
    REFUSED,
    Ack,
    Joined,
    Packed,
    Parameters,
    Push,
)

DELTA = Packed("none", 2, (np.zeros(2, np.float32),))


def push(slot: int = 0, term: int = 1, seq: int = 0) -> Push:
    return Push(slot, term, 1, seq, 0, 0, 0, 1, 0, DELTA)


# ---------------------------------------------------------------- the shard's side


def test_only_the_next_number_is_new() -> None:
    deliveries = Dedup()
    deliveries.join(0, 1)
    assert deliveries.judge(push(seq=0)) == NEW
    deliveries.take(push(seq=0))
    assert deliveries.judge(push(seq=0)) == DUPLICATE
    assert deliveries.judge(push(seq=1)) == NEW
    assert deliveries.judge(push(seq=2)) == GAP


def test_a_term_must_join_before_it_pushes_and_fences_the_one_before() -> None:
    deliveries = Dedup()
    assert deliveries.judge(push(term=1)) == UNKNOWN
    assert deliveries.join(0, 1)
    deliveries.take(push(term=1))
    assert deliveries.join(0, 2)
    assert deliveries.judge(push(term=1, seq=1)) == FENCED
    assert deliveries.next_seq(0) == 0


def test_joining_again_in_the_same_term_forgets_nothing() -> None:
    deliveries = Dedup()
    deliveries.join(0, 1)
    deliveries.take(push(seq=0))
    assert not deliveries.join(0, 1)
    assert deliveries.judge(push(seq=0)) == DUPLICATE


def test_what_is_saved_is_what_is_restored() -> None:
    deliveries, restored = Dedup(), Dedup()
    deliveries.join(3, 7)
    deliveries.take(push(3, 7, 0))
    restored.load(deliveries.to_json(), [])
    assert restored.judge(push(3, 7, 0)) == DUPLICATE
    assert restored.judge(push(3, 7, 1)) == NEW


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=60))
def test_whatever_arrives_each_number_is_taken_once_and_in_order(
    arrivals: list[tuple[int, int]],
) -> None:
    deliveries, taken = Dedup(), {slot: [] for slot in range(3)}  # type: ignore[var-annotated]
    for slot in range(3):
        deliveries.join(slot, 1)
    for slot, seq in arrivals:
        if deliveries.judge(push(slot, 1, seq)) == NEW:
            deliveries.take(push(slot, 1, seq))
            taken[slot].append(seq)
    assert all(seqs == list(range(len(seqs))) for seqs in taken.values())


def test_a_token_is_good_for_one_run_slot_and_epoch() -> None:
    token = sign(b"key", "run", 1, 2)
    assert is_genuine(b"key", "run", 1, 2, token)
    for run, slot, term in (("other", 1, 2), ("run", 2, 2), ("run", 1, 3)):
        assert not is_genuine(b"key", run, slot, term, token)
    assert not is_genuine(b"other", "run", 1, 2, token)
    assert not is_genuine(b"key", "run", 1, 2, b"")


# ---------------------------------------------------------------- the worker's side


class Talk:
    """A worker's channel with the outbox that it sends through."""

    def __init__(self) -> None:
        self.context = Context(1.0)
        self.retries = self.context.retries
        self.send_queue = SendQueue(self.retries)
        self.channel = joined(client(self.context, hi=2))
        self.again()

    def push(self, now: float = 0.0) -> list[Send]:
        message = self.channel.push(0, 0, 1, 0, DELTA)
        key = self.channel.push_key(message.seq)
        self.send_queue.queue(key, self.channel.peer, message, DELTA.nbytes)
        return self.send_queue.flush(now)

    def again(self) -> list[Send]:
        """What was sent again."""
        return [effect for effect in self.context.clear() if isinstance(effect, Send)]

    def ack(self, seq: int, outcome: str = APPLIED, term: int = 1, next_seq: int = 0) -> Ack:
        return Ack(0, term, seq, outcome, 1, 0, next_seq)


def sent(sends: list[Send]) -> list[int]:
    return [s.message.seq for s in sends if isinstance(s.message, Push)]


def test_pushes_are_numbered_densely_and_settled_by_their_acks() -> None:
    talk = Talk()
    assert [sent(talk.push()) for _ in range(3)] == [[0], [1], [2]]
    assert talk.channel.on_ack(talk.ack(1), 0.5) == 0.5
    assert talk.again() == []
    assert len(talk.channel._unsettled) == 2


def test_an_ack_counts_once() -> None:
    talk = Talk()
    talk.push()
    assert talk.channel.on_ack(talk.ack(0), 0.1) == 0.1
    assert talk.channel.on_ack(talk.ack(0, DUPLICATE), 0.2) is None


def test_the_window_bounds_what_is_unsettled() -> None:
    talk = Talk()
    for _ in range(WINDOW):
        assert talk.channel.has_space()
        talk.push()
    assert not talk.channel.has_space()
    talk.channel.on_ack(talk.ack(0), 0.1)
    assert talk.channel.has_space()


def test_no_push_is_on_its_way_of_which_the_shard_may_have_forgotten_what_became() -> None:
    """The ack of the first one is lost, all others come."""
    talk, deliveries = Talk(), Dedup()
    deliveries.join(0, 1)
    while talk.channel.has_space():
        seq = talk.channel.next_seq
        talk.push()
        deliveries.take(push(seq=seq))
        deliveries.settle(0, 1, seq, REFUSED)
        if seq:
            talk.channel.on_ack(talk.ack(seq, REFUSED), 0.1)
    assert talk.channel.next_seq == REACH
    assert deliveries.outcome_of(push(seq=0)) == REFUSED
    talk.channel.on_ack(talk.ack(0, REFUSED), 0.2)
    assert talk.channel.has_space()


def test_a_gap_has_everything_from_there_sent_again_in_order() -> None:
    talk = Talk()
    for _ in range(4):
        talk.push()
    assert talk.channel.on_ack(talk.ack(3, GAP, next_seq=1), 0.1) is None
    assert sent(talk.again()) == [1, 2, 3]
    assert talk.channel.on_ack(talk.ack(2, GAP, next_seq=1), 0.1) is None
    assert talk.again() == [], "once is enough"


def test_a_held_push_stays_unsettled() -> None:
    talk = Talk()
    talk.push()
    assert talk.channel.on_ack(talk.ack(0, HELD), 0.1) is None
    assert len(talk.channel._unsettled) == 1


def test_a_push_without_an_ack_is_sent_again_under_its_number() -> None:
    talk = Talk()
    talk.push(now=0.0)
    assert sent(talk.retries.due(0.9)) == []
    assert sent(talk.retries.due(1.1)) == [0]


def test_after_a_restart_of_the_shard_the_unsettled_pushes_go_to_the_new_term() -> None:
    talk = Talk()
    talk.push()
    talk.channel.link.on_join_again(2, 0.1)
    assert [type(s.message).__name__ for s in talk.again()] == ["Join"]
    talk.channel.link.on_join_again(2, 0.1)
    assert talk.again() == [], "one join is enough"
    assert talk.channel.link.on_joined(Joined(0, 2, 0, 0, 2, True, 0), 0.2)
    assert [(s.message.seq, s.message.shard_term) for s in talk.again()] == [(0, 2)]  # type: ignore[union-attr]


def test_acks_of_an_old_term_of_the_shard_are_ignored() -> None:
    talk = Talk()
    talk.push()
    talk.channel.link.on_join_again(5, 0.1)
    talk.channel.link.on_joined(Joined(0, 5, 0, 0, 2, True, 0), 0.1)
    assert talk.channel.on_ack(talk.ack(0, term=4), 0.2) is None
    stale = Parameters(0, 4, 1, 9, np.zeros(2, np.float32))
    assert talk.channel.on_parameters(stale, 0.2) is None


def test_a_fenced_worker_learns_it_from_any_shard() -> None:
    talk = Talk()
    talk.push()
    talk.channel.on_ack(replace(talk.ack(0, FENCED), reason="replaced"), 0.1)
    assert Exit(EXIT_FENCED, "fenced") in talk.context.clear()


# ---------------------------------------------------------------- both together


@given(
    st.integers(1, 12),
    st.lists(st.sampled_from(["deliver", "lose", "repeat", "lose ack", "time"]), max_size=120),
)
def test_over_any_link_each_push_is_applied_once(pushes: int, outcome_of: list[str]) -> None:
    """Messages are lost, repeated and delayed; in the end the link is good and all is settled."""
    talk, shard, applied = Talk(), Dedup(), []
    shard.join(0, 1)
    on_the_way: list[Push] = []
    now, made = 0.0, 0
    for step in [*outcome_of, *["time", *["deliver"] * 40] * 40]:
        if made < pushes and talk.channel.has_space():
            on_the_way += [s.message for s in talk.push(now)]  # type: ignore[misc]
            made += 1
        if step == "time":
            now += 20.0
            on_the_way += [s.message for s in talk.retries.due(now)]  # type: ignore[misc]
        if step == "time" or not on_the_way:
            continue
        message = on_the_way[0] if step == "repeat" else on_the_way.pop(0)
        if step == "lose":
            continue
        verdict = shard.judge(message)
        if verdict == NEW:
            shard.take(message)
            applied.append(message.seq)
            verdict = APPLIED
        if step != "lose ack":
            ack = talk.ack(message.seq, verdict, next_seq=shard.next_seq(0))
            talk.channel.on_ack(ack, now)
            on_the_way += [s.message for s in talk.again()]  # type: ignore[misc]
    assert applied == list(range(pushes))
    assert len(talk.channel._unsettled) == 0


def test_what_is_kept_goes_no_further_than_the_lowest_held_push() -> None:
    deliveries, next_server = Dedup(), Dedup()
    deliveries.join(0, 1)
    for seq in range(3):
        deliveries.take(push(seq=seq))
    deliveries.settle(0, 1, 1, HELD)
    assert deliveries.judge(push(seq=1)) == DUPLICATE
    assert deliveries.outcome_of(push(seq=1)) == HELD
    next_server.load(deliveries.to_json(), [])
    assert [next_server.judge(push(seq=seq)) for seq in range(4)] == [
        DUPLICATE, NEW, DUPLICATE, GAP,
    ]  # fmt: skip
    next_server.take(push(seq=1))
    assert next_server.judge(push(seq=2)) == DUPLICATE
    assert next_server.judge(push(seq=3)) == NEW
    deliveries.settle(0, 1, 1, APPLIED)
    assert deliveries.to_json() == [[0, 1, 3]] == next_server.to_json()


def test_a_new_term_forgets_what_was_held_of_the_old_one() -> None:
    deliveries = Dedup()
    deliveries.join(0, 1)
    deliveries.take(push(seq=0))
    deliveries.settle(0, 1, 0, HELD)
    deliveries.join(0, 2)
    deliveries.settle(0, 1, 0, APPLIED)
    assert deliveries.to_json() == [[0, 1, 0], [0, 2, 0]], "nothing held is in what is kept"
    next_server = Dedup()
    next_server.load(deliveries.to_json(), [])
    assert next_server.to_json() == deliveries.to_json()
    assert next_server.is_current(0, 2)
    assert next_server.is_fenced(0, 1)


def test_what_was_dropped_is_not_called_a_duplicate_of_what_is_in_the_shard() -> None:
    deliveries, next_server = Dedup(), Dedup()
    deliveries.join(0, 1)
    for seq, outcome in enumerate((APPLIED, LATE, REFUSED)):
        deliveries.take(push(seq=seq))
        deliveries.settle(0, 1, seq, outcome)
    next_server.load(deliveries.to_json(), deliveries.outcomes())
    for table in (deliveries, next_server):
        assert [table.outcome_of(push(seq=seq)) for seq in range(3)] == [DUPLICATE, LATE, REFUSED]


@given(st.lists(st.tuples(st.sampled_from((APPLIED, LATE, REFUSED, HELD)), st.integers(0, 40))))
def test_what_became_of_the_newest_numbers_is_known_however_they_are_settled(
    pushes: list[tuple[str, int]],
) -> None:
    """Each number is held, or settled at once; `jump` numbers that are applied come before it."""
    deliveries, known, held = Dedup(), dict[int, str](), list[int]()
    deliveries.join(0, 1)
    for outcome, jump in pushes:
        for what in [*[APPLIED] * jump, outcome]:
            seq = deliveries.next_seq(0)
            if deliveries.judge(push(seq=seq)) == GAP:
                assert seq == held[0] + HELD_REACH
                known[held[0]] = LATE
                deliveries.settle(0, 1, held.pop(0), LATE)
            if deliveries.judge(push(seq=seq)) == GAP:
                break
            deliveries.take(push(seq=seq))
            if what == HELD:
                held.append(seq)
            else:
                known[seq] = DUPLICATE if what == APPLIED else what
            deliveries.settle(0, 1, seq, what)
    again = Dedup()
    again.load(deliveries.to_json(), deliveries.outcomes())
    for seq in range(max(0, deliveries.next_seq(0) - REACH), deliveries.next_seq(0)):
        if seq not in held:
            assert (
                deliveries.outcome_of(push(seq=seq))
                == again.outcome_of(push(seq=seq))
                == known[seq]
            )


def test_behind_a_held_push_only_a_few_are_taken_until_it_is_settled() -> None:
    """Their numbers are in every commit."""
    deliveries = Dedup()
    deliveries.join(0, 1)
    for seq in range(HELD_REACH):
        assert deliveries.judge(push(seq=seq)) == NEW
        deliveries.take(push(seq=seq))
        deliveries.settle(0, 1, seq, HELD if seq == 0 else LATE)
    assert deliveries.judge(push(seq=HELD_REACH)) == GAP
    assert deliveries.to_json() == [[0, 1, 0, *range(1, HELD_REACH)]]
    deliveries.settle(0, 1, 0, APPLIED)
    assert deliveries.judge(push(seq=HELD_REACH)) == NEW
