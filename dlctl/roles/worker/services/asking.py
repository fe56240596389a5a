"""Requests between replicas: questions, and answers to others' questions.

A question is resent until its answer arrives, its deadline passes, or the replica that was asked
has left or has another term. A repeated question gets the stored answer, so a method serves each
question once; of several questions of one replica only the newest is served. A replica does not
answer while it computes a gradient, and a process whose slot has a newer term never answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.needs import Ask
from dlctl.errors import RemoteProtocolError
from dlctl.model.vector import to_host
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.meters import Rates
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.services.answer_runner import AnswerRunner
from dlctl.roles.worker.services.base import Phase
from dlctl.roles.worker.shard_client import Identity
from dlctl.util.names import ASKING
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer

GONE = "gone"
"""The error of an answer: the process that was asked does not have the expected term."""
RAW = "raw"
"""The arrays of a question, uncompressed."""
NO_MODEL = "it has no model of this run"
MODEL = "dlctl.model"
"""A question that the role, not the method, asks and answers: the replica's current model."""
ARRAYS_MAX = 8
OP_CHARS_MAX = 64
ERROR_CHARS_MAX = 400
MARGIN_BYTES = 64 * 1024
MODELS_MAX = 8
"""Maximum size of a question or an answer, in models, besides `MARGIN_BYTES`."""
BATCH_BYTES_MAX = 1 << 30
"""The same where batches are sent, whose size does not depend on that of the model."""


def bytes_max(size: int, *, batches: bool = False) -> int:
    """Maximum size of a question or an answer if the model has `size` float32 elements. batches:
    replicas send batches to each other.
    """
    return BATCH_BYTES_MAX if batches else MODELS_MAX * 4 * size + MARGIN_BYTES


def fault(payload: m.Packed, nbytes_max: int, op: str = "") -> str:
    """Why these arrays are no valid question or answer; "" if they are."""
    if len(op) > OP_CHARS_MAX:
        return f"its name has more than {OP_CHARS_MAX} characters"
    if payload.kind != RAW:
        return f"its arrays are packed as {payload.kind:.20}"
    if len(payload.arrays) > ARRAYS_MAX:
        return f"it has {len(payload.arrays)} arrays; at most {ARRAYS_MAX}"
    if payload.length != sum(array.size for array in payload.arrays):
        return f"it does not have {payload.length} elements"
    if payload.nbytes > nbytes_max:
        return f"it has {payload.nbytes} bytes; at most {nbytes_max}"
    strange = [str(a.dtype) for a in payload.arrays if a.dtype not in codec.DTYPES]
    return f"{strange[0]} is not a type that can be sent" if strange else ""


Then = Callable[[tuple[m.Array, ...] | None], None]
"""Called with the answer to a question; None: there is none."""


class Question(NamedTuple):
    """A question that is not answered yet."""

    slot: int
    op: str
    payload: m.Packed
    until: float
    then: Then
    term: int | None = None
    """The term of its receiver; None: it is queued behind another one to the same replica."""


@dataclass(eq=False)
class Asking:
    """Serves `Ask`. At most one question per replica is in flight."""

    context: Context
    identity: Identity
    members: PeerMembers
    size: int
    """Elements of the model, which bounds the size of questions and answers."""
    rates: Rates
    """Counts the bytes of questions as pushed, and those of answers as fetched."""
    serves_on: bool = False
    """Drained replicas answer, too, and questions are batches (`Shape.serves_on`)."""

    def __post_init__(self) -> None:
        self.unanswered = 0
        """Number of questions without an answer."""
        self.newest: tuple[m.Array, ...] = ()
        """The answer that arrived last."""
        self.refusal = ""
        """Why the question that ended last was refused; "": it was not."""
        self._bytes_max = bytes_max(self.size, batches=self.serves_on)
        self._number = 0
        self._open: dict[int, Question] = {}
        """Number -> a question, in ascending order."""
        self._waits_for = 0
        """The question that the replica waits for; 0: none."""
        self._answer: tuple[m.Array, ...] | None = None
        self._completed: list[tuple[Then, tuple[m.Array, ...] | None]] = []
        """What to do with an answer, and the answer, of completed questions that the method does
        not wait for."""

    # ------------------------------------------------------------ the service

    def begin(self, need: Ask, now: float) -> None:
        """Send or queue a question. Raises TypeError for one that every replica would refuse."""
        waits = need.then is None
        self._answer, self._waits_for = None, self._number + 1 if waits else 0
        then = self._on_awaited if need.then is None else partial(self._on_completed, need.then)
        self.ask(need.slot, need.op, need.arrays, now + need.within_s, then, now)

    def poll(self, now: float) -> tuple[bool, tuple[m.Array, ...] | None]:
        self.advance(now)
        return not self._waits_for, self._answer

    def phase(self) -> Phase:
        waits_for = self._open.get(self._waits_for)
        return Phase(ASKING, (f"worker-{waits_for.slot}",) if waits_for else ())

    def deadline(self) -> float | None:
        """When to call `advance`, whatever the replica waits for."""
        every = self._open.values()
        return min((each.until for each in every if each.until < math.inf), default=None)

    def _on_awaited(self, answer: tuple[m.Array, ...] | None) -> None:
        self._answer, self._waits_for = answer, 0

    def _on_completed(self, then: Then, answer: tuple[m.Array, ...] | None) -> None:
        self._completed.append((then, answer))

    # ------------------------------------------------------------ questions

    def ask(
        self, slot: int, op: str, arrays: tuple[Any, ...], until: float, then: Then, now: float
    ) -> None:
        """`then` may be called immediately. Raises TypeError for a question that every replica
        would refuse.
        """
        payload = pack(arrays)
        if wrong := fault(payload, self._bytes_max, op):
            raise TypeError(f"it asks {op!r:.80}: {wrong}")
        self._number += 1
        self._open[self._number] = Question(slot, op, payload, until, then)
        self._send_next(now)

    def _send_next(self, now: float) -> None:
        """Send the oldest question to each replica that has none in flight."""
        asked = set()
        for number, question in list(self._open.items()):
            if question.term is None and question.slot not in asked:
                self._send(number, question, now)
            if number in self._open:
                asked.add(question.slot)

    def _send(self, number: int, question: Question, now: float) -> None:
        slot = question.slot
        member = self.members.known.get(slot)
        is_any = question.op == MODEL or self.serves_on
        takes_part = member is not None and (member.takes_part or is_any)
        can_answer = member is not None and takes_part and bool(member.address)
        if member is None or not can_answer or slot == self.identity.slot:
            self._give_up(number)
            return
        self._open[number] = question._replace(term=member.term)
        me, payload = self.identity, question.payload
        ask = m.PeerRequest(me.slot, me.term, member.term, number, question.op, payload)
        peer = f"worker-{slot}"
        self.rates.add("push_bytes", payload.nbytes, peer)
        self.context.ask(_key(number), peer, ask, now, payload.nbytes)

    def is_open(self) -> bool:
        """Whether any question is unanswered."""
        return bool(self._open)

    def advance(self, now: float) -> None:
        """Abandon the questions that cannot be answered any more, and send queued ones."""
        for number, question in list(self._open.items()):
            slot, term = question.slot, question.term
            has_left = term is not None and not self.members.has(slot, term)
            if has_left or now >= question.until:
                self._give_up(number)
        self._send_next(now)

    def has_answers(self) -> bool:
        """Whether `deliver` has something to pass on."""
        return bool(self._completed)

    def deliver(self) -> None:
        """Pass the method the answers that it does not wait for, while it computes nothing."""
        ended, self._completed = self._completed, []
        for then, answer in ended:
            then(answer)

    def on_answer(self, peer: Peer, answer: m.PeerReply, now: float) -> None:
        """A late answer, or one of another process than was asked, is dropped.

        Raises RemoteProtocolError for an invalid answer, which also ends its question.
        """
        question = self._open.get(answer.request)
        if question is None or peer != f"worker-{answer.slot}":
            return
        if (question.slot, question.term) != (answer.slot, answer.term):
            return
        wrong = fault(answer.payload, self._bytes_max)
        if answer.error or wrong:
            self._give_up(answer.request, wrong or answer.error)
        else:
            self.context.retries.done(_key(answer.request), now)
            self.rates.add("fetch_bytes", answer.payload.nbytes, f"worker-{answer.slot}")
            del self._open[answer.request]
            self.newest = answer.payload.arrays
            question.then(self.newest)
        if wrong:
            raise RemoteProtocolError(wrong)

    def _give_up(self, number: int, error: str = "") -> None:
        self.unanswered += 1
        self.refusal = "" if error in (GONE, NO_MODEL) else error
        self.context.retries.drop(_key(number))
        self._open.pop(number).then(None)


def _key(number: int) -> tuple[str, int]:
    return ("ask", number)


@dataclass(eq=False)
class Answering:
    """Answers other replicas, between two steps of this one."""

    context: Context
    identity: Identity
    members: PeerMembers
    side: ReplicaSide
    has_model: Callable[[], bool]
    """Whether this replica holds a model of the run."""
    serving: AnswerRunner | None = None
    """Runs answers that take needs."""
    batches: bool = False
    """Questions are batches."""

    def __post_init__(self) -> None:
        self.served = 0
        self._under_way: tuple[int, int, int] | None = None
        """(slot, term, number) of the question that `serving` answers."""
        self._bytes_max = bytes_max(len(self.side.parameters), batches=self.batches)
        self._waiting: dict[int, tuple[Peer, m.PeerRequest]] = {}
        """Slot -> its newest question, not answered yet."""
        self._answers: dict[int, tuple[int, m.PeerReply]] = {}
        """Slot -> its term at that time, and the newest answer to it."""

    def on_ask(self, peer: Peer, ask: m.PeerRequest) -> None:
        """Answer a question of another replica. Raises RemoteProtocolError for one that no replica
        of this run would send.
        """
        if wrong := fault(ask.payload, self._bytes_max, ask.op):
            raise RemoteProtocolError(wrong)
        is_old = self.members.is_replaced(ask.slot, ask.term)
        # First: a fenced process must not even resend an earlier answer.
        if self._is_fenced() or ask.to_term != self.identity.term or is_old:
            self.context.send(peer, self._reply(ask, error=GONE))
            return
        if not self.members.has(ask.slot, ask.term):
            return  # This replica does not know that member yet; the member will retry.
        if self._under_way == (ask.slot, ask.term, ask.request):
            return  # It is repeated.
        term, answer = self._answers.get(ask.slot, (-1, None))
        if answer is None or term != ask.term or answer.request < ask.request:
            _, newest = self._waiting.get(ask.slot, (peer, ask))
            if newest.term != ask.term or newest.request <= ask.request:  # Else a duplicate.
                self._waiting[ask.slot] = peer, ask
        elif answer.request == ask.request:
            self.context.send(peer, answer)

    def _is_fenced(self) -> bool:
        return self.members.is_replaced(self.identity.slot, self.identity.term)

    def is_asked(self) -> bool:
        """Whether questions are queued."""
        return bool(self._waiting)

    def serve(self, now: float = 0.0) -> None:
        """Answer the queued questions; to be called while no gradient is being computed."""
        if not self._waiting or (self.serving is not None and self.serving.is_busy):
            return
        # Drop the answers, which may be large, to terms that are gone: none ever returns.
        answers, has = self._answers.items(), self.members.has
        self._answers = {slot: kept for slot, kept in answers if has(slot, kept[0])}
        waiting, self._waiting = self._waiting, {}
        for slot, (peer, ask) in waiting.items():
            if not has(slot, ask.term) or self._is_fenced():
                continue
            if self.serving is not None and self.serving.is_busy:
                self._waiting[slot] = peer, ask  # One after the other.
                continue
            if (answer := self._answer(peer, ask, now)) is not None:
                self._reply_with(peer, ask, answer)

    def _reply_with(self, peer: Peer, ask: m.PeerRequest, answer: m.PeerReply) -> None:
        if ask.op != MODEL:  # A model is large, and a retry may get the model of that time.
            self._answers[ask.slot] = ask.term, answer
        self.context.send(peer, answer)

    def _served(self, peer: Peer, ask: m.PeerRequest, arrays: tuple[m.Array, ...]) -> None:
        """An answer that took needs is complete."""
        self._under_way = None
        self._reply_with(peer, ask, self._packed(ask, arrays))

    def _packed(self, ask: m.PeerRequest, arrays: tuple[m.Array, ...]) -> m.PeerReply:
        payload, where = pack(arrays), type(self.side).__module__
        why = fault(payload, self._bytes_max)
        if why:  # It could not be sent, and the replica that asked would wait in vain.
            payload, why = pack(()), f"{where} cannot send its answer: {why}"
            self.context.note("warning", why)
        self.served += not why
        return self._reply(ask, payload, why[:ERROR_CHARS_MAX])

    def _answer(self, peer: Peer, ask: m.PeerRequest, now: float) -> m.PeerReply | None:
        """None: the answer takes needs, and follows."""
        where = type(self.side).__module__
        if ask.op == MODEL and not self.has_model():
            return self._reply(ask, error=NO_MODEL)
        if ask.op == MODEL:
            return self._reply(ask, pack((to_host(self.side.parameters),)))
        try:
            answer = self.side.serve(ask.op, ask.payload.arrays)
        except RemoteProtocolError as error:
            return self._reply(ask, error=f"refused: {error.message}"[:ERROR_CHARS_MAX])
        except NotImplementedError as error:
            return self._reply(ask, error=f"{where}: {error}"[:ERROR_CHARS_MAX])
        if isinstance(answer, tuple):
            return self._packed(ask, answer)
        assert self.serving is not None
        self._under_way = ask.slot, ask.term, ask.request
        self.serving.begin(answer, partial(self._served, peer, ask), now)
        return None

    def _reply(
        self, ask: m.PeerRequest, payload: m.Packed | None = None, error: str = ""
    ) -> m.PeerReply:
        me = self.identity
        return m.PeerReply(me.slot, me.term, ask.request, error, payload or pack(()))


def pack(arrays: tuple[Any, ...]) -> m.Packed:
    """Arrays of any shape, flat and copied: the originals may change before they are sent."""
    flat = tuple(np.array(array).reshape(-1) for array in arrays)
    return m.Packed(RAW, sum(array.size for array in flat), flat)
