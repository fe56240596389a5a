"""Rows to a tracker whose process dies, hangs or never begins: none twice, none lost in silence."""

from __future__ import annotations

from dlctl.observe.delivery import (
    ANSWER_S,
    BEGIN_S,
    PAUSE_FIRST_S,
    PAUSE_MAX_S,
    ROWS_MAX,
    WINDOW,
    Delivery,
)


def started(delivery: Delivery, now: float, *, begins: bool = True) -> Delivery:
    assert delivery.may_start(now)
    delivery.started(now)
    if begins:
        delivery.begun(now)
    return delivery


def sent(delivery: Delivery, now: float) -> list[bytes]:
    found = []
    while (row := delivery.take(now)) is not None:
        found.append(row[1])
    return found


def add(delivery: Delivery, count: int, first: int = 0) -> list[bytes]:
    lines = [b"%d" % number for number in range(first, first + count)]
    for line in lines:
        delivery.add(line)
    return lines


def test_rows_go_in_their_order_and_leave_the_queue_when_answered() -> None:
    delivery = started(Delivery(), 0.0)
    lines = add(delivery, 3)
    assert sent(delivery, 1.0) == lines
    delivery.answered(2, 2.0)
    assert delivery.pending == 1
    delivery.answered(3, 2.0)
    assert (delivery.pending, delivery.why, delivery.dropped) == (0, "", 0)


def test_the_next_process_gets_what_was_not_answered() -> None:
    delivery = started(Delivery(), 0.0)
    lines = add(delivery, 5)
    sent(delivery, 1.0)
    delivery.answered(2, 1.0)
    delivery.ended("killed", 2.0)
    assert (delivery.why, delivery.take(2.0), delivery.may_start(2.0)) == ("killed", None, False)
    started(delivery, 2.0 + PAUSE_FIRST_S)
    assert sent(delivery, 4.0) == lines[2:]
    assert delivery.why == "killed", "nothing has arrived yet"
    delivery.answered(5, 5.0)
    assert (delivery.pending, delivery.why) == (0, "")


def test_no_more_than_a_window_is_under_way() -> None:
    delivery = started(Delivery(), 0.0)
    lines = add(delivery, WINDOW + 5)
    assert sent(delivery, 1.0) == lines[:WINDOW]
    delivery.answered(3, 1.0)
    assert sent(delivery, 1.0) == lines[WINDOW : WINDOW + 3]


def test_of_too_many_the_oldest_that_waits_is_dropped_and_counted() -> None:
    delivery = started(Delivery(), 0.0)
    under_way = add(delivery, 2)
    sent(delivery, 0.0)
    lines = add(delivery, ROWS_MAX + 3, first=2)
    assert (delivery.pending, delivery.dropped) == (ROWS_MAX, 5)
    delivery.answered(len(under_way), 1.0)
    assert sent(delivery, 1.0) == lines[5 : 5 + WINDOW]


def test_pauses_grow_until_a_row_has_arrived() -> None:
    delivery, now, pauses = Delivery(), 0.0, []
    add(delivery, 1)
    for _ in range(12):
        started(delivery, now)
        delivery.ended("refused", now)
        pause = next(n for n in range(1, 1000) if delivery.may_start(now + n))
        pauses.append(float(pause))
        now += pause
    assert pauses[:4] == [PAUSE_FIRST_S, 2.0, 4.0, 8.0]
    assert pauses[-1] == PAUSE_MAX_S
    started(delivery, now)
    sent(delivery, now)
    delivery.answered(1, now)
    delivery.ended("refused", now)
    assert delivery.may_start(now + PAUSE_FIRST_S)
    delivery.ended("refused", now)
    delivery.hurry()
    assert delivery.may_start(now)


def test_a_process_is_late_that_does_not_begin_or_does_not_answer() -> None:
    delivery = started(Delivery(), 0.0, begins=False)
    assert not delivery.is_late(BEGIN_S)
    assert delivery.is_late(BEGIN_S + 1.0)
    delivery.begun(10.0)
    assert not delivery.is_late(10_000.0), "it owes no answer"
    add(delivery, 2)
    sent(delivery, 10_000.0)
    assert not delivery.is_late(10_000.0 + ANSWER_S)
    assert delivery.is_late(10_001.0 + ANSWER_S)
    delivery.answered(1, 10_050.0)
    assert not delivery.is_late(10_050.0 + ANSWER_S)
    delivery.ended("killed", 11_000.0)
    assert not delivery.is_late(20_000.0)


def test_rows_may_be_under_way_before_the_tracker_is_there() -> None:
    delivery = started(Delivery(), 0.0, begins=False)
    lines = add(delivery, 2)
    assert sent(delivery, 1.0) == lines
    assert not delivery.is_late(ANSWER_S + 10.0)
    delivery.begun(200.0)
    assert not delivery.is_late(200.0 + ANSWER_S)
