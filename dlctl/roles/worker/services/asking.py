"""Replicas that ask each other: who takes part, questions, and answers to others' questions.

A question is repeated until its answer comes, its deadline passes, or whoever is asked has left or
has another epoch. The answer to a repeat is the one that there was, so a method serves each
question once; of several questions of one replica only the newest is served. Nobody is answered
while a gradient is computed, and nothing is answered by a process whose slot has a newer epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dlctl import messages as m
from dlctl import wire
from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.needs import Ask
from dlctl.errors import RemoteProtocolError
from dlctl.machine import Connect, Peer
from dlctl.roles.protocol.authz import Authz
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.worker.services.base import Phase
from dlctl.roles.worker.shard_client import Identity

GONE = "gone"
"""The process that was asked is none of the epoch that was meant."""
RAW = "raw"
"""The arrays of a question as they are: no compressor expands them."""
ARRAYS_MAX = 8
OP_CHARS_MAX = 64
ERROR_CHARS_MAX = 400
MARGIN_BYTES = 64 * 1024
MODELS_MAX = 8
"""A question or an answer may be so many times as large as the model, and a margin."""


def bytes_max(size: int) -> int:
    """Of a question, or an answer, of replicas whose model has `size` elements of float32."""
    return MODELS_MAX * 4 * size + MARGIN_BYTES


def fault(payload: m.Packed, nbytes_max: int) -> str:
    """Why these arrays can be neither a question nor an answer; "" if they can."""
    if payload.kind != RAW:
        return f"its arrays are packed as {payload.kind:.20}"
    if len(payload.arrays) > ARRAYS_MAX:
        return f"it has {len(payload.arrays)} arrays; at most {ARRAYS_MAX}"
    if payload.length != sum(array.size for array in payload.arrays):
        return f"it has other than {payload.length} elements"
    if payload.nbytes > nbytes_max:
        return f"it has {payload.nbytes} bytes; at most {nbytes_max}"
    strange = [str(a.dtype) for a in payload.arrays if a.dtype not in wire.DTYPES]
    return f"{strange[0]} is no type that can be sent" if strange else ""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that takes part, as the coordinator has told."""

    epoch: int
    address: str
    """"" while it does not listen."""
    key: str
    takes_part: bool

    def address_of(self) -> tuple[int, str, str]:
        """What a connection to it goes by."""
        return self.epoch, self.address, self.key


class Members:
    """Who takes part in the run, and the connections to them."""

    def __init__(self, context: Context, name: str, *, connects: bool) -> None:
        """name: this daemon's. connects: whether replicas ask each other at all."""
        self.context = context
        self.name = name
        self.connects = connects
        self.authz = Authz(context)
        self.number = 0
        """Of the newest list."""
        self.known: dict[int, Member] = {}

    @property
    def slots(self) -> frozenset[int]:
        """Those that take part."""
        return frozenset(slot for slot, member in self.known.items() if member.takes_part)

    def on_peers(self, message: m.Peers, own_slot: int) -> bool:
        """Take a list; an older one may come late, or again. Returns whether it is news.

        Raises RemoteProtocolError if it does not fit itself.
        """
        columns = (message.slots, message.epochs, message.addresses, message.keys)
        if len({len(column) for column in columns}) != 1:
            raise RemoteProtocolError("its columns differ in length")
        self.context.send(COORDINATOR, m.PeersNoted(self.name, message.number))
        if message.number <= self.number:
            return False
        self.number, before = message.number, self.known
        self.known = {
            slot: Member(epoch, address, key, slot not in message.joining)
            for slot, epoch, address, key in zip(*columns, strict=True)
        }
        if self.connects:
            self._connect(before, own_slot)
        return True

    def _connect(self, before: dict[int, Member], own_slot: int) -> None:
        others = {slot: member for slot, member in self.known.items() if slot != own_slot}
        keys = {member.key: f"worker-{slot}" for slot, member in others.items()}
        if "" not in keys:
            self.authz.admit(keys)
        for slot, member in others.items():
            is_new = (
                known := before.get(slot)
            ) is None or known.address_of() != member.address_of()
            if member.address and is_new:
                self.context.do(Connect(f"worker-{slot}", member.address, member.key))


class Asking:
    """Serves `Ask`: one question at a time."""

    def __init__(self, context: Context, identity: Identity, members: Members, size: int) -> None:
        """size: elements of the model, which questions and answers are measured by."""
        self.context = context
        self.identity = identity
        self.members = members
        self.unanswered = 0
        """Questions that came to nothing."""
        # An answer waits for the end of a step: that says nothing of how soon others answer.
        self._outstanding = context.measures_apart()
        self._bytes_max = bytes_max(size)
        self._number = 0
        self._asked: tuple[int, int] | None = None
        """(slot, epoch) of whom it waits for."""
        self._until = 0.0
        self._answer: tuple[m.Array, ...] | None = None

    def begin(self, need: Ask, now: float) -> None:
        """Raises TypeError for a question that nobody would take."""
        self._answer, self._asked = None, None
        payload = pack(need.arrays)
        if wrong := fault(payload, self._bytes_max):
            raise TypeError(f"it asks {need.op!r:.80}: {wrong}")
        if len(need.op) > OP_CHARS_MAX:
            raise TypeError(
                f"it asks {need.op!r:.80}: that has more than {OP_CHARS_MAX} characters"
            )
        member = self.members.known.get(need.slot)
        can_answer = member is not None and member.takes_part and bool(member.address)
        if member is None or not can_answer or need.slot == self.identity.slot:
            self.unanswered += 1
            return
        self._number += 1
        self._asked, self._until = (need.slot, member.epoch), now + need.within_s
        me, peer = self.identity, f"worker-{need.slot}"
        ask = m.Ask(me.slot, me.epoch, member.epoch, self._number, need.op, payload)
        self.context.do(self._outstanding.add(self._key(), peer, ask, now, payload.nbytes))

    def _key(self) -> tuple[str, int]:
        return ("ask", self._number)

    def poll(self, now: float) -> tuple[bool, tuple[m.Array, ...] | None]:
        if self._asked is not None and (now >= self._until or self._has_left(*self._asked)):
            self._give_up()
        self.context.do(*self._outstanding.due(now))
        return self._asked is None, self._answer

    def _has_left(self, slot: int, epoch: int) -> bool:
        member = self.members.known.get(slot)
        return member is None or member.epoch != epoch

    def on_answer(self, peer: Peer, answer: m.Answer, now: float) -> None:
        """A late answer, or of another process than was asked, is dropped.

        Raises RemoteProtocolError for one that no replica would give; nobody waits for another one.
        """
        is_theirs = self._asked == (answer.slot, answer.epoch) and peer == f"worker-{answer.slot}"
        if not is_theirs or answer.request != self._number:
            return
        wrong = fault(answer.payload, self._bytes_max)
        if answer.error or wrong:
            self._give_up()
        else:
            self._outstanding.done(self._key(), now)
            self._asked, self._answer = None, answer.payload.arrays
        if wrong:
            raise RemoteProtocolError(wrong)

    def phase(self) -> Phase:
        return Phase("asking", (f"worker-{self._asked[0]}",) if self._asked else ())

    def deadline(self) -> float | None:
        if self._asked is None:
            return None
        repeat = self._outstanding.deadline()
        return self._until if repeat is None else min(self._until, repeat)

    def _give_up(self) -> None:
        if self._asked is not None:
            self.unanswered += 1
            self._outstanding.drop(self._key())
            self._asked = None


class Answering:
    """Answers other replicas, between two steps of its own."""

    def __init__(
        self, context: Context, identity: Identity, members: Members, side: ReplicaSide
    ) -> None:
        self.context = context
        self.identity = identity
        self.members = members
        self.side = side
        self.served = 0
        self._bytes_max = bytes_max(len(side.parameters))
        self._waiting: dict[int, tuple[Peer, m.Ask]] = {}
        """Slot -> its newest question, not answered yet."""
        self._answers: dict[int, tuple[int, m.Answer]] = {}
        """Slot -> epoch of whoever asked, and the newest answer to it."""
        self._list = 0
        """The list of members by which answers were last kept."""

    def on_ask(self, peer: Peer, ask: m.Ask) -> None:
        """Raises RemoteProtocolError for a question that no replica of this run would ask."""
        if len(ask.op) > OP_CHARS_MAX:
            raise RemoteProtocolError("it is no question of a replica's")
        if wrong := fault(ask.payload, self._bytes_max):
            raise RemoteProtocolError(wrong)
        # First of all: who is not in charge any more does not even say again what it has said.
        if self.is_fenced() or ask.to_epoch != self.identity.epoch or self._is_old(ask):
            self.context.send(peer, self._reply(ask, error=GONE))
            return
        if not self._is_known(ask):
            return  # We have not been told of it yet; it asks again.
        epoch, answer = self._answers.get(ask.slot, (-1, None))
        if answer is None or epoch != ask.epoch or answer.request < ask.request:
            self._let_wait(peer, ask)
        elif answer.request == ask.request:
            self.context.send(peer, answer)

    def _let_wait(self, peer: Peer, ask: m.Ask) -> None:
        """A copy of an older question may come behind the newest one: nobody waits for it."""
        _, newest = self._waiting.get(ask.slot, (peer, ask))
        if newest.epoch != ask.epoch or newest.request <= ask.request:
            self._waiting[ask.slot] = peer, ask

    def is_fenced(self) -> bool:
        """Whether this slot has a newer epoch than this process."""
        member = self.members.known.get(self.identity.slot)
        return member is not None and member.epoch > self.identity.epoch

    def _is_known(self, ask: m.Ask) -> bool:
        """Whether it takes part, or is about to."""
        member = self.members.known.get(ask.slot)
        return member is not None and member.epoch == ask.epoch

    def _is_old(self, ask: m.Ask) -> bool:
        member = self.members.known.get(ask.slot)
        return member is not None and member.epoch > ask.epoch

    def serve(self) -> None:
        """Answer what waits; to be called while no gradient is being computed."""
        self._forget_gone()
        waiting, self._waiting = self._waiting, {}
        for slot, (peer, ask) in waiting.items():
            if not self._is_known(ask) or self.is_fenced():
                continue
            answer = self._answer(ask)
            self._answers[slot] = ask.epoch, answer
            self.context.send(peer, answer)

    def _forget_gone(self) -> None:
        """Answers may be large, and no process comes back with the epoch that it had."""
        if self._list == self.members.number:
            return
        self._list, known = self.members.number, self.members.known
        self._answers = {
            slot: kept
            for slot, kept in self._answers.items()
            if slot in known and known[slot].epoch == kept[0]
        }

    def _answer(self, ask: m.Ask) -> m.Answer:
        where = type(self.side).__module__
        try:
            payload = pack(self.side.serve(ask.op, ask.payload.arrays))
            why = fault(payload, self._bytes_max)
        except RemoteProtocolError as error:
            payload, why = pack(()), f"refused: {error.message}"
        except NotImplementedError as error:
            payload, why = pack(()), f"{where}: {error}"
        else:
            if why:  # It would never leave, and whoever asks would wait for nothing.
                payload, why = pack(()), f"{where} cannot send its answer: {why}"
                self.context.note("warning", why)
        self.served += not why
        return self._reply(ask, payload, why[:ERROR_CHARS_MAX])

    def _reply(self, ask: m.Ask, payload: m.Packed | None = None, error: str = "") -> m.Answer:
        me = self.identity
        return m.Answer(me.slot, me.epoch, ask.request, error, payload or pack(()))


def pack(arrays: tuple[Any, ...]) -> m.Packed:
    """Arrays of any shape, flat and copied: what they are of may change before they are sent."""
    flat = tuple(np.array(array).reshape(-1) for array in arrays)
    return m.Packed(RAW, sum(array.size for array in flat), flat)
