"""Answers of a server that has another part of the model by now, before its worker knows that."""

from __future__ import annotations

import numpy as np
from builders import client, identity, joined

from dlctl.roles.protocol.context import Context
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.wire import messages as m

SIZE = 4


def asked() -> ShardClient:
    """A client whose read is under way; its server is known by term 1."""
    known = joined(client(Context(1.0), lo=SIZE, hi=2 * SIZE), term=1)
    fetch = m.Fetch(identity().slot, identity().term, 7, 0)
    known.context.ask(known.fetch_key(7), known.peer, fetch, 0.0)
    return known


def parameters(term: int) -> m.Parameters:
    """Of a part that is as large as the old one."""
    return m.Parameters(0, term, 7, 3, np.ones(SIZE, np.float32))


def test_values_of_a_term_that_was_not_joined_are_not_taken_for_those_of_the_old_part() -> None:
    known = asked()
    assert known.on_parameters(parameters(term=2), 1.0) is None
    answer = known.on_parameters(parameters(term=1), 2.0)
    assert answer is not None, "the read still waits for its answer"


def test_nor_those_of_a_process_that_is_known_and_not_joined() -> None:
    """It was told of by `Moved`, and its answer to a join is of a cut that the worker does not
    know, so that answer does not count.
    """
    known = asked()
    known.link.term = 2
    known.link.join(1.0)
    assert known.on_parameters(parameters(term=2), 1.0) is None
    assert known.link.on_joined(m.Joined(0, 2, 3, SIZE, 2 * SIZE, True, 0), 2.0)
    assert known.on_parameters(parameters(term=2), 3.0) is not None
