"""A computation that asks the head: it waits for the next process of the head, but does not ask for
ever what is refused; and nobody hands out the model of a party."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import identity, joined_tables, site, training

from dlctl.algorithms.methods.split import PREDICT, SPLIT, BatchKey, Options
from dlctl.errors import JobFailed
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import BringAnswer
from dlctl.roles.protocol.meters import Rates
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.services.asking import GONE, MODEL, Asking, pack
from dlctl.roles.worker.services.remote import Remote
from dlctl.wire import messages as m
from dlctl.wire.machine import Send
from dlctl.wire.messages import Array

HEAD = 1
WANTED = (BatchKey(0, 0, 0, 0).to_array(), np.ones(2, np.float32))


class Client:
    """The questions of a client, worker-0, to the head, worker-1."""

    def __init__(self) -> None:
        self.context = Context(0.5)
        members = PeerMembers(self.context, "worker-0", connects=True)
        members.on_peers(m.Peers(1, (0, HEAD), (), (1, 1), ("at-0", "at-1"), ("", "")), 0)
        rates = Rates("push_bytes", "fetch_bytes")
        self.asking = Asking(self.context, identity(0, 1), members, 4, rates, True)
        self.remote = Remote(self.context, self.asking, members, HEAD)
        self.remote.want(PREDICT, WANTED, 0.0)

    def asked(self) -> m.PeerRequest:
        """The only question that was sent since the last call."""
        effects: list[Any] = self.context.clear()
        sent = [e.message for e in effects if isinstance(e, Send)]
        (asked,) = [message for message in sent if isinstance(message, m.PeerRequest)]
        return asked

    def gets(self, error: str, *arrays: Array) -> None:
        answer = m.PeerReply(HEAD, 1, self.asked().request, error, pack(arrays))
        self.asking.on_answer(f"worker-{HEAD}", answer, 1.0)


def test_the_next_process_of_the_head_is_asked_again():
    client = Client()
    client.gets(GONE)
    client.remote.advance(2.0)
    assert client.remote.waits
    client.gets("", np.ones(3, np.float32))
    assert not client.remote.waits
    (brought,) = [e for e in client.context.clear() if isinstance(e, BringAnswer)]
    assert brought.arrays[0].tolist() == [1, 1, 1]


def test_what_the_head_refuses_ends_the_wait_with_its_reason():
    with pytest.raises(JobFailed, match="no samples"):
        Client().gets("refused: a tensor has no shape, or no samples")


def test_a_party_does_not_hand_out_its_model():
    context, parameters = Context(0.5), np.zeros(3, np.float32)
    tables = joined_tables(SPLIT, context, 3, 1)
    context.clear()
    side = SPLIT.replica(replace(site(Options(), parameters), role="client"))
    side.begin("new")
    members = PeerMembers(context, "worker-0", connects=True)
    members.on_peers(m.Peers(1, (0, HEAD), (), (1, 1), ("at-0", "at-1"), ("", "")), 0)
    client = training(context, tables, SPLIT, side, members=members, asks=HEAD)
    client.on_ask(b"connection", m.PeerRequest(HEAD, 1, 1, 1, MODEL, pack(())))
    client.advance(0.0)
    sent: list[Any] = [each for each in context.clear() if isinstance(each, Send)]
    (reply,) = [each.message for each in sent if isinstance(each.message, m.PeerReply)]
    assert reply.error
    assert not reply.payload.arrays
