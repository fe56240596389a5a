"""The earliest of many deadlines, against a plain dictionary."""

from __future__ import annotations

import random

from dlctl.util.deadlines import Deadlines


def test_it_agrees_with_a_dictionary_whatever_is_set_and_dropped() -> None:
    draw, deadlines, plain = random.Random(1), Deadlines(), dict[str, float]()
    for _ in range(3000):
        key, due = f"key {draw.randrange(20)}", float(draw.randrange(50))
        if draw.random() < 0.3:
            deadlines.set(key, None)
            plain.pop(key, None)
        else:
            deadlines.set(key, due)
            plain[key] = due
        assert deadlines.first() == min(plain.values(), default=None)
        now = float(draw.randrange(-1, 50))
        assert set(deadlines.by(now)) == {key for key, due in plain.items() if due <= now}


def test_each_key_is_due_once_although_its_time_was_set_back_and_forth() -> None:
    deadlines = Deadlines()
    for due in (3.0, 1.0, 3.0, 1.0):
        deadlines.set(("spawn", "worker-0"), due)
    assert deadlines.by(2.0) == deadlines.by(2.0) == [("spawn", "worker-0")]
    deadlines.set(("spawn", "worker-0"), None)
    assert (deadlines.by(9.0), deadlines.first()) == ([], None)
