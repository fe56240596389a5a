"""The pause between two attempts of a server that has no room for its shard."""

from __future__ import annotations

import itertools

from dlctl import messages as m
from dlctl.roles.server.space import RETRY_S, RETRY_S_MAX, Space

ASSIGN = m.Assign(0, 10, b"", "", keep=True)


def tried(room: Space, until_s: float, attempt_s: float) -> list[tuple[float, float]]:
    """(begin, end) of every attempt; each one takes that long, and finds no room."""
    attempts, now = [], 0.0
    room.wait(ASSIGN, now)
    while (due_s := room.deadline()) is not None and due_s < until_s:
        now = max(now, due_s)
        if room.due(now) is None:
            continue
        attempts.append((now, now + attempt_s))
        room.wait(ASSIGN, now)
        now += attempt_s
    return attempts


def test_the_pauses_grow_and_do_not_shrink_because_an_attempt_takes_long():
    for attempt_s in (0.0, 100.0):
        attempts = tried(Space(), 1000.0, attempt_s)
        pauses = [begin - end for (_, end), (begin, _) in itertools.pairwise(attempts)]
        assert pauses[0] == 2 * RETRY_S
        assert set(pauses[1:]) == {RETRY_S_MAX}


def test_only_the_first_attempt_without_room_is_news():
    room = Space()
    assert [room.wait(ASSIGN, now) for now in (0.0, 1.0)] == [True, False]
    room.found()
    assert room.deadline() is None
    assert room.wait(ASSIGN, 9.0)
