"""Replicas that ask each other, over a link that loses and repeats, in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from made import identity, site

from dlctl import messages as m
from dlctl.algorithms.base import Needs, ReplicaSide
from dlctl.algorithms.needs import Ask
from dlctl.errors import RemoteProtocolError
from dlctl.machine import Connect, Send
from dlctl.messages import Packed
from dlctl.roles.protocol.authz import offence
from dlctl.roles.protocol.context import Context
from dlctl.roles.worker.services.asking import GONE, Answering, Asking, Members, pack

RESEND_S = 0.5


class Echo(ReplicaSide):
    """Answers with twice what it is asked, and counts how often."""

    served = 0

    def run(self) -> Needs:
        raise AssertionError("this one only answers")
        yield

    def serve(self, op: str, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        if op != "double":
            raise RemoteProtocolError(f"no {op}")
        self.served += 1
        return tuple(2 * array for array in arrays)


class Replica:
    def __init__(self, slot: int, epoch: int = 1) -> None:
        self.slot, self.me = slot, identity(slot, epoch)
        self.context = Context(RESEND_S)
        self.members = Members(self.context, f"worker-{slot}", connects=True)
        self.side = Echo(site(None, np.zeros(4, np.float32), slot))
        self.asking = Asking(self.context, self.me, self.members)
        self.answering = Answering(self.context, self.me, self.members, self.side)

    def told(self, number: int, epochs: dict[int, int], joining: tuple[int, ...] = ()) -> None:
        slots = tuple(epochs)
        addresses = tuple(f"at-{slot}" for slot in slots)
        keys = ("",) * len(slots)
        message = m.Peers(number, slots, joining, tuple(epochs.values()), addresses, keys)
        self.members.on_peers(message, self.slot)

    def sent(self, kind: type) -> list[Any]:
        effects = self.context.clear()
        return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


@pytest.fixture
def pair() -> tuple[Replica, Replica]:
    pair = Replica(0), Replica(1)
    for replica in pair:
        replica.told(1, {0: 1, 1: 1})
        replica.context.clear()
    return pair


def ask(replica: Replica, now: float = 0.0, within_s: float = 5.0, op: str = "double") -> m.Ask:
    need = Ask(slot=1, op=op, arrays=(np.arange(3.0),), within_s=within_s)
    replica.asking.begin(need, now)
    (message,) = replica.sent(m.Ask)
    return message


def answer_of(replica: Replica, message: m.Ask) -> m.Answer:
    replica.answering.on_ask(b"connection", message)
    replica.answering.serve()
    (answer,) = replica.sent(m.Answer)
    return answer


def test_a_question_gets_its_answer(pair):
    one, other = pair
    answer = answer_of(other, ask(one))
    assert one.asking.poll(1.0) == (False, None)
    assert one.asking.phase() == ("asking", ("worker-1",))
    one.asking.on_answer("worker-1", answer, 1.0)
    done, arrays = one.asking.poll(1.0)
    assert done
    assert arrays is not None
    assert arrays[0].tolist() == [0, 2, 4]


def test_a_lost_question_is_repeated_and_served_once(pair):
    one, other = pair
    first = ask(one)
    repeats = [e.message for e in one.context.retries.due(10.0)]
    assert repeats == [first]
    answers = [answer_of(other, message) for message in (first, first, first)]
    assert other.side.served == 1
    assert all(answer is answers[0] for answer in answers)
    one.asking.on_answer("worker-1", answers[0], 1.0)
    assert not one.context.retries.due(100.0)


def test_a_question_that_waits_is_answered_between_two_steps_only(pair):
    one, other = pair
    other.answering.on_ask(b"connection", ask(one))
    assert other.sent(m.Answer) == []
    other.answering.serve()
    assert len(other.sent(m.Answer)) == 1


def test_nobody_waits_beyond_the_deadline(pair):
    one, _ = pair
    ask(one, now=0.0, within_s=2.0)
    assert one.asking.deadline() == 2.0
    assert one.asking.poll(1.9) == (False, None)
    assert one.asking.poll(2.0) == (True, None)
    assert one.asking.unanswered == 1
    assert not one.context.retries.due(100.0), "it is not sent again"


@pytest.mark.parametrize("epochs", [{0: 1}, {0: 1, 1: 2}], ids=["has left", "was replaced"])
def test_who_has_left_is_not_waited_for(pair, epochs):
    one, other = pair
    late = answer_of(other, ask(one))
    one.told(2, epochs)
    assert one.asking.poll(0.1) == (True, None)
    one.asking.on_answer("worker-1", late, 0.2)
    assert one.asking.poll(0.3) == (True, None), "a late answer is dropped"


@pytest.mark.parametrize("slot", [0, 1, 2], ids=["itself", "one that joins", "nobody"])
def test_who_cannot_answer_is_not_asked(pair, slot):
    one, _ = pair
    one.told(2, {0: 1, 1: 1}, joining=(1,))
    one.context.clear()
    one.asking.begin(Ask(slot=slot, op="double"), 0.0)
    assert one.asking.poll(0.0) == (True, None)
    assert one.sent(m.Ask) == []


def test_a_process_whose_slot_has_a_newer_epoch_answers_nobody(pair):
    one, other = pair
    question = ask(one)
    other.told(2, {0: 1, 1: 2})
    other.context.clear()
    assert answer_of(other, question).error == GONE
    assert other.side.served == 0


def test_a_question_for_another_epoch_is_not_answered(pair):
    one, _ = pair
    question = ask(one)
    assert answer_of(Replica(1, epoch=2), question).error == GONE


def test_what_the_method_does_not_take_is_an_error_and_not_an_answer(pair):
    one, other = pair
    answer = answer_of(other, ask(one, op="halve"))
    assert "no halve" in answer.error
    one.asking.on_answer("worker-1", answer, 0.0)
    assert one.asking.poll(0.0) == (True, None)


def test_answers_of_others_and_to_other_questions_are_dropped(pair):
    one, other = pair
    old = answer_of(other, ask(one))
    ask(one)
    one.asking.on_answer("worker-1", old, 0.0)
    one.asking.on_answer("worker-2", old, 0.0)
    assert one.asking.poll(0.0) == (False, None)


@pytest.mark.parametrize(
    "payload",
    [
        Packed("none", 3, (np.zeros(3),)),
        Packed("raw", 9, tuple(np.zeros(1) for _ in range(9))),
        Packed("raw", 10**6, (np.zeros(10**6),)),
    ],
    ids=["another kind", "too many arrays", "too large"],
)
def test_what_no_replica_would_ask_is_refused(pair, payload):
    _, other = pair
    with pytest.raises(RemoteProtocolError):
        other.answering.on_ask(b"x", m.Ask(0, 1, 1, 1, "double", payload))


def test_an_older_list_of_members_changes_nothing(pair):
    one, _ = pair
    one.told(3, {0: 1, 1: 4})
    one.context.clear()
    one.told(2, {0: 1})
    assert one.members.slots == {0, 1}
    assert [e for e in one.context.clear() if isinstance(e, Connect)] == []


def test_a_list_whose_columns_differ_in_length_is_refused(pair):
    one, _ = pair
    with pytest.raises(RemoteProtocolError):
        one.members.on_peers(m.Peers(9, (0, 1), (), (1,), ("", ""), ("", "")), 0)


@pytest.mark.parametrize(
    ("who", "message", "may"),
    [
        ("worker-0", m.Ask(0, 1, 1, 1, "x", pack(())), True),
        ("worker-0", m.Ask(2, 1, 1, 1, "x", pack(())), False),
        ("server-0", m.Ask(0, 1, 1, 1, "x", pack(())), False),
        ("client", m.Ask(0, 1, 1, 1, "x", pack(())), False),
        ("worker-0", m.Listening(0, 1, "x"), True),
        ("worker-0", m.GroupBroken(1, 1, 1, "x"), False),
    ],
)
def test_only_workers_ask_and_each_speaks_for_itself(who, message, may):
    assert (offence(who, message) == "") is may
