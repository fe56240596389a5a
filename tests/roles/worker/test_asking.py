"""Replicas that ask each other, over a link that loses and repeats, in virtual time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from builders import identity, site, training

from dlctl import registry
from dlctl.algorithms.base import Needs, ReplicaSide
from dlctl.algorithms.needs import Ask
from dlctl.errors import RemoteProtocolError
from dlctl.roles.protocol.authz import offence
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.meters import Rates
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.services.asking import GONE, Answering, Asking, pack
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Connect, Send
from dlctl.wire.messages import Packed

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
    def __init__(self, slot: int, term: int = 1) -> None:
        self.slot, self.me = slot, identity(slot, term)
        self.context = Context(RESEND_S)
        self.members = PeerMembers(self.context, f"worker-{slot}", connects=True)
        self.side = Echo(site(None, np.zeros(4, np.float32), slot))
        self.rates = Rates("push_bytes", "fetch_bytes")
        self.asking = Asking(self.context, self.me, self.members, 4, self.rates)
        self.answering = Answering(self.context, self.me, self.members, self.side, lambda: True)

    def hears_of(self, number: int, terms: dict[int, int], joining: tuple[int, ...] = ()) -> None:
        slots = tuple(terms)
        addresses = tuple(f"at-{slot}" for slot in slots)
        keys = ("",) * len(slots)
        message = m.Peers(number, slots, joining, tuple(terms.values()), addresses, keys)
        self.members.on_peers(message, self.slot)

    def poll(self, now: float) -> tuple[bool, Any]:
        """As a worker does, which resends what is due."""
        result = self.asking.poll(now)
        self.context.do(*self.context.retries.due(now))
        return result

    def sent(self, kind: type) -> list[Any]:
        effects = self.context.clear()
        return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


@pytest.fixture
def pair() -> tuple[Replica, Replica]:
    pair = Replica(0), Replica(1)
    for replica in pair:
        replica.hears_of(1, {0: 1, 1: 1})
        replica.context.clear()
    return pair


def ask(
    replica: Replica, now: float = 0.0, within_s: float = 5.0, op: str = "double"
) -> m.PeerRequest:
    need = Ask(slot=1, op=op, arrays=(np.arange(3.0),), within_s=within_s)
    replica.asking.advance(math.inf)  # An earlier question has no answer.
    replica.asking.begin(need, now)
    (message,) = replica.sent(m.PeerRequest)
    return message


def answer_of(replica: Replica, message: m.PeerRequest) -> m.PeerReply:
    replica.answering.on_ask(b"connection", message)
    replica.answering.serve()
    (answer,) = replica.sent(m.PeerReply)
    return answer


def test_a_question_gets_its_answer(pair):
    one, other = pair
    answer = answer_of(other, ask(one))
    assert one.poll(1.0) == (False, None)
    assert one.asking.phase() == ("asking", ("worker-1",))
    one.asking.on_answer("worker-1", answer, 1.0)
    done, arrays = one.poll(1.0)
    assert done
    assert arrays is not None
    assert arrays[0].tolist() == [0, 2, 4]
    assert one.rates.total == dict.fromkeys(("push_bytes", "fetch_bytes"), arrays[0].nbytes)


def test_a_lost_question_is_repeated_and_served_once(pair):
    one, other = pair
    first = ask(one)
    assert one.poll(4.0) == (False, None)
    assert one.sent(m.PeerRequest) == [first]
    answers = [answer_of(other, message) for message in (first, first, first)]
    assert other.side.served == 1
    assert all(answer is answers[0] for answer in answers)
    one.asking.on_answer("worker-1", answers[0], 4.5)
    assert one.poll(100.0)[0]
    assert one.sent(m.PeerRequest) == [], "it is not sent again"


def test_a_question_that_waits_is_answered_between_two_steps_only(pair):
    one, other = pair
    other.answering.on_ask(b"connection", ask(one))
    assert other.sent(m.PeerReply) == []
    other.answering.serve()
    assert len(other.sent(m.PeerReply)) == 1


def test_nobody_waits_beyond_the_deadline(pair):
    one, _ = pair
    ask(one, now=0.0, within_s=2.0)
    assert one.context.retries.deadline() == pytest.approx(RESEND_S, abs=0.01)
    assert one.poll(1.9) == (False, None)
    assert one.asking.deadline() == 2.0
    one.context.clear()
    assert one.poll(2.0) == (True, None)
    assert one.asking.unanswered == 1
    assert one.poll(100.0) == (True, None)
    assert one.sent(m.PeerRequest) == [], "it is not sent again"


@pytest.mark.parametrize("terms", [{0: 1}, {0: 1, 1: 2}], ids=["has left", "was replaced"])
def test_who_has_left_is_not_waited_for(pair, terms):
    one, other = pair
    late = answer_of(other, ask(one))
    one.hears_of(2, terms)
    assert one.poll(0.1) == (True, None)
    one.asking.on_answer("worker-1", late, 0.2)
    assert one.poll(0.3) == (True, None), "a late answer is dropped"


@pytest.mark.parametrize("slot", [0, 1, 2], ids=["itself", "one that joins", "nobody"])
def test_who_cannot_answer_is_not_asked(pair, slot):
    one, _ = pair
    one.hears_of(2, {0: 1, 1: 1}, joining=(1,))
    one.context.clear()
    one.asking.begin(Ask(slot=slot, op="double"), 0.0)
    assert one.poll(0.0) == (True, None)
    assert one.sent(m.PeerRequest) == []


def test_a_process_whose_slot_has_a_newer_term_answers_nobody(pair):
    one, other = pair
    question = ask(one)
    other.hears_of(2, {0: 1, 1: 2})
    other.context.clear()
    assert answer_of(other, question).error == GONE
    assert other.side.served == 0


def test_a_question_for_another_term_is_not_answered(pair):
    one, _ = pair
    question = ask(one)
    assert answer_of(Replica(1, term=2), question).error == GONE


def test_what_the_method_does_not_take_is_an_error_and_not_an_answer(pair):
    one, other = pair
    answer = answer_of(other, ask(one, op="halve"))
    assert "no halve" in answer.error
    one.asking.on_answer("worker-1", answer, 0.0)
    assert one.poll(0.0) == (True, None)


def test_answers_of_others_and_to_other_questions_are_dropped(pair):
    one, other = pair
    old = answer_of(other, ask(one))
    question = ask(one)
    before = m.PeerReply(1, 0, question.request, "", old.payload)
    one.asking.on_answer("worker-1", before, 0.0)  # Of an old term.
    one.asking.on_answer("worker-1", old, 0.0)
    one.asking.on_answer("worker-2", old, 0.0)
    assert one.poll(0.0) == (False, None)


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
        other.answering.on_ask(b"x", m.PeerRequest(0, 1, 1, 1, "double", payload))


def test_an_older_list_of_members_changes_nothing(pair):
    one, _ = pair
    one.hears_of(3, {0: 1, 1: 4})
    one.context.clear()
    one.hears_of(2, {0: 1})
    assert one.members.slots == {0, 1}
    assert [e for e in one.context.clear() if isinstance(e, Connect)] == []


def test_a_list_whose_columns_differ_in_length_is_refused(pair):
    one, _ = pair
    with pytest.raises(RemoteProtocolError):
        one.members.on_peers(m.Peers(9, (0, 1), (), (1,), ("", ""), ("", "")), 0)


@pytest.mark.parametrize(
    ("who", "message", "may"),
    [
        ("worker-0", m.PeerRequest(0, 1, 1, 1, "x", pack(())), True),
        ("worker-0", m.PeerRequest(2, 1, 1, 1, "x", pack(())), False),
        ("server-0", m.PeerRequest(0, 1, 1, 1, "x", pack(())), False),
        ("client", m.PeerRequest(0, 1, 1, 1, "x", pack(())), False),
        ("worker-0", m.Listening(0, 1, "x"), True),
        ("worker-0", m.GroupBroken(1, 1, 1, "x", ""), False),
    ],
)
def test_only_workers_ask_and_each_speaks_for_itself(who, message, may):
    assert (offence(who, message) == "") is may


# ---------------------------------------------------------------- what is held strictly


def given(other: Replica, arrays: tuple[Any, ...] | Exception) -> None:
    """What its method answers, whatever it is asked."""

    def serve(op: str, asked: tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(arrays, Exception):
            raise arrays
        return arrays

    other.side.serve = serve  # type: ignore[method-assign]


def test_a_process_that_was_replaced_does_not_even_repeat_its_answer(pair):
    one, other = pair
    question = ask(one)
    assert answer_of(other, question).error == ""
    other.hears_of(2, {0: 1, 1: 2})
    other.context.clear()
    assert answer_of(other, question).error == GONE


def test_a_late_copy_of_an_older_question_does_not_take_the_place_of_the_newest(pair):
    one, other = pair
    older, newest = ask(one), ask(one)
    for message in (newest, older):
        other.answering.on_ask(b"connection", message)
    other.answering.serve()
    assert [answer.request for answer in other.sent(m.PeerReply)] == [newest.request]
    other.answering.on_ask(b"connection", older)
    other.answering.serve()
    assert (other.side.served, other.sent(m.PeerReply)) == (1, [])


def test_of_one_replica_only_the_newest_question_is_served(pair):
    one, other = pair
    for message in (ask(one), ask(one), ask(one)):
        other.answering.on_ask(b"connection", message)
    other.answering.serve()
    assert (other.side.served, len(other.sent(m.PeerReply))) == (1, 1)


def test_the_next_process_of_a_slot_begins_its_questions_anew(pair):
    one, other = pair
    for _ in range(3):
        answer_of(other, ask(one))
    successor = Replica(0, term=2)
    for replica in (successor, other):
        replica.hears_of(2, {0: 2, 1: 1})
        replica.context.clear()
    answer = answer_of(other, ask(successor))
    assert (answer.request, answer.error, other.side.served) == (1, "", 4)
    assert answer_of(other, ask(one)).error == GONE, "nobody answers a process that was replaced"


def test_answers_to_whoever_has_left_are_not_kept(pair):
    one, other = pair
    answer_of(other, ask(one))
    other.hears_of(2, {1: 1, 2: 1})
    other.context.clear()
    answer_of(other, m.PeerRequest(2, 1, 1, 1, "double", pack(())))
    assert other.answering._answers.keys() == {2}


def test_who_asks_before_the_list_names_it_asks_again(pair):
    _, other = pair
    other.hears_of(2, {1: 1})
    other.context.clear()
    message = m.PeerRequest(0, 1, 1, 1, "double", pack((np.ones(1),)))
    other.answering.on_ask(b"connection", message)
    other.answering.serve()
    assert other.sent(m.PeerReply) == []
    other.hears_of(3, {0: 1, 1: 1})
    other.context.clear()
    assert answer_of(other, message).error == ""


def test_a_method_that_answers_nobody_does_not_fall_over(pair):
    one, other = pair
    question = ask(one)
    given(other, NotImplementedError("Echo answers nobody"))
    answer = answer_of(other, question)
    assert answer.error.startswith(f"{Echo.__module__}: Echo ")
    assert other.answering.served == 0


@pytest.mark.parametrize(
    "arrays",
    [(np.zeros(1, bool),), tuple(np.zeros(1) for _ in range(9)), (np.zeros(10**5),)],
    ids=["a type that cannot be sent", "too many", "too large"],
)
def test_an_answer_that_cannot_be_sent_is_an_error_at_once(pair, arrays):
    one, other = pair
    question = ask(one)
    given(other, arrays)
    answer = answer_of(other, question)
    assert "send" in answer.error
    codec.encode(answer)


def test_the_words_of_a_refusal_are_cut(pair):
    one, other = pair
    question = ask(one)
    given(other, RemoteProtocolError("x" * 10**6))
    assert len(answer_of(other, question).error) < 1000


@pytest.mark.parametrize(
    "payload",
    [
        Packed("topk", 1, (np.zeros(1),)),
        Packed("raw", 2, (np.zeros(1),)),
        Packed("raw", 9, tuple(np.zeros(1) for _ in range(9))),
        Packed("raw", 10**5, (np.zeros(10**5),)),
    ],
    ids=["another kind", "another length", "too many arrays", "too large"],
)
def test_an_answer_that_no_replica_would_give_is_none(pair, payload):
    one, _ = pair
    question = ask(one)
    with pytest.raises(RemoteProtocolError):
        one.asking.on_answer("worker-1", m.PeerReply(1, 1, question.request, "", payload), 0.0)
    assert one.poll(0.0) == (True, None)
    assert one.asking.unanswered == 1


def test_a_replica_at_work_holds_answers_to_its_model_and_counts_what_it_sends_again():
    one = Replica(0)
    one.hears_of(1, {0: 1, 1: 1})
    ring = registry.load("algorithms", "toy-ring")
    work = training(one.context, [], ring, one.side, me=one.me, members=one.members)
    one.context.clear()
    work.asking.begin(Ask(slot=1, op="double", within_s=30.0), 0.0)
    (question,) = one.sent(m.PeerRequest)
    before = work.metrics(1.0)["repeated"]
    assert one.context.retries.due(5.0) == [Send("worker-1", question)]
    assert work.metrics(5.0)["repeated"] == before + 1
    large = m.PeerReply(1, 1, question.request, "", Packed("raw", 10**5, (np.zeros(10**5),)))
    with pytest.raises(RemoteProtocolError, match="bytes"):
        work.asking.on_answer("worker-1", large, 5.0)
    assert work.asking.poll(5.0) == (True, None)


@pytest.mark.parametrize(
    "need",
    [
        Ask(slot=1, op="x" * 65),
        Ask(slot=1, op="x", arrays=tuple(np.zeros(1) for _ in range(9))),
        Ask(slot=1, op="x", arrays=(np.zeros(1, bool),)),
    ],
    ids=["a long name", "too many arrays", "a type that cannot be sent"],
)
def test_a_method_learns_at_once_that_nobody_would_take_its_question(pair, need):
    one, _ = pair
    with pytest.raises(TypeError):
        one.asking.begin(need, 0.0)


def test_how_long_a_step_of_another_replica_takes_says_nothing_of_other_words(pair):
    one, other = pair
    now = 0.0
    for _ in range(10):
        question = ask(one, now)
        for _ in range(20):
            now += 0.1
            one.poll(now)
        one.context.clear()
        one.asking.on_answer("worker-1", answer_of(other, question), now)
    one.context.ask("word", "coordinator", m.Drained("worker-0"), now)
    assert one.context.retries.deadline() == pytest.approx(now + RESEND_S)


def test_what_was_asked_over_a_connection_that_has_ended_is_asked_again(pair):
    one, _ = pair
    question = ask(one, now=0.0)
    one.context.retries.again("worker-1", 0.1, 0.2)
    assert one.poll(0.2) == (False, None)
    assert one.sent(m.PeerRequest) == [question]


# ---------------------------------------------------------------- over a link that is not kind


class House:
    """Replicas that ask each other in turn, over a link that loses, repeats and delays."""

    LOSS, DUPLICATE, DELAY_S, TICK_S = 0.2, 0.2, 0.6, 0.05

    def __init__(self, count: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.now, self.number = 0.0, 1
        self.terms = dict.fromkeys(range(count), 1)
        self.replicas = {slot: Replica(slot) for slot in range(count)}
        self.under_way: list[tuple[float, int, int, m.Message]] = []
        """When it arrives, from whom, for whom."""
        self.asked: dict[int, float] = {}
        """Slot -> the number that it has asked to be doubled."""
        self.answered = self.unanswered = self.questions = 0
        self.served = 0
        """By processes that are gone."""
        for replica in self.replicas.values():
            replica.hears_of(1, self.terms)

    def replace(self, slot: int) -> None:
        self.number += 1
        self.served += self.replicas[slot].side.served
        self.terms[slot] += 1
        self.replicas[slot] = Replica(slot, self.terms[slot])
        self.asked.pop(slot, None)
        for replica in self.replicas.values():
            replica.hears_of(self.number, self.terms)

    def run(self, until: float) -> None:
        while self.now < until:
            self.now += self.TICK_S
            arrived = sorted((w for w in self.under_way if w[0] <= self.now), key=lambda w: w[0])
            self.under_way = [word for word in self.under_way if word[0] > self.now]
            for _, source, target, message in arrived:
                self._take(source, self.replicas[target], message)
            for slot, replica in self.replicas.items():
                self._work(slot, replica)

    def _take(self, source: int, replica: Replica, message: m.Message) -> None:
        if isinstance(message, m.PeerRequest):
            replica.answering.on_ask(str(source).encode(), message)
        elif isinstance(message, m.PeerReply):
            replica.asking.on_answer(f"worker-{source}", message, self.now)

    def _work(self, slot: int, replica: Replica) -> None:
        if self.rng.random() < 0.3:  # between two steps
            replica.answering.serve()
        if slot in self.asked:
            done, arrays = replica.poll(self.now)
            if done:
                self._resumed(self.asked.pop(slot), arrays)
        if slot not in self.asked:
            others = [other for other in self.replicas if other != slot]
            value = float(self.rng.integers(1000))
            need = Ask(
                slot=int(self.rng.choice(others)), op="double", arrays=(np.array([value]),),
                within_s=float(self.rng.choice([1.0, 10.0])),
            )  # fmt: skip
            self.asked[slot], self.questions = value, self.questions + 1
            replica.asking.begin(need, self.now)
        for effect in replica.context.clear():
            if isinstance(effect, Send):
                self._carry(slot, effect)

    def _resumed(self, value: float, arrays: tuple[Any, ...] | None) -> None:
        if arrays is None:
            self.unanswered += 1
            return
        self.answered += 1
        assert arrays[0].tolist() == [2 * value], "the answer to another question"

    def _carry(self, slot: int, effect: Send) -> None:
        if effect.peer == "coordinator":
            return
        peer = effect.peer.decode() if isinstance(effect.peer, bytes) else effect.peer
        target = int(peer.rpartition("-")[2])
        copies = 0 if self.rng.random() < self.LOSS else 1 + (self.rng.random() < self.DUPLICATE)
        for _ in range(copies):
            arrival = self.now + self.DELAY_S * float(self.rng.random())
            message = codec.decode([bytes(frame) for frame in codec.encode(effect.message)])
            self.under_way.append((arrival, slot, target, message))


@pytest.mark.parametrize("seed", range(6))
def test_over_a_poor_link_each_question_has_its_own_answer_or_none(seed):
    house = House(3, seed)
    for until in (30.0, 60.0, 90.0):
        house.run(until)
        house.replace(int(house.rng.integers(3)))
    house.run(120.0)
    served = house.served + sum(r.side.served for r in house.replicas.values())
    assert house.answered > 50
    assert house.answered <= served <= house.questions, "each is served once at most"
    assert house.unanswered < house.answered
