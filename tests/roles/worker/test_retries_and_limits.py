"""What waits for an answer, and what waits for a byte rate."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlctl.roles.protocol.meters import Latency, Rates, Staleness
from dlctl.roles.protocol.retry import AGE_S_MAX, BACKOFF_MAX, PUT_OFF, Retries
from dlctl.roles.worker.send_queue import Limiter, SendQueue
from dlctl.roles.worker.shard_client import WINDOW
from dlctl.wire.messages import Drain, Message

MESSAGE = Drain("because")


def test_a_message_is_sent_until_it_is_answered() -> None:
    waiting = Retries(1.0)
    assert waiting.add("key", "peer", MESSAGE, 0.0).message is MESSAGE
    assert waiting.deadline() == 1.0
    assert [send.peer for send in waiting.due(1.0)] == ["peer"]
    assert waiting.done("key", 1.5) == 1.5
    assert waiting.deadline() is None
    assert waiting.due(100.0) == []


def test_the_pause_doubles_up_to_four_times() -> None:
    waiting, now, pauses = Retries(1.0), 0.0, []
    waiting.add("key", "peer", MESSAGE, now)
    for _ in range(6):
        deadline = waiting.deadline()
        assert deadline is not None
        pauses.append(deadline - now)
        now = deadline
        waiting.due(now)
    assert pauses == [1, 2, BACKOFF_MAX, BACKOFF_MAX, BACKOFF_MAX, BACKOFF_MAX]


def test_a_slow_peer_gets_more_time() -> None:
    waiting = Retries(1.0)
    waiting.add("first", "peer", MESSAGE, 0.0)
    waiting.done("first", 0.9)
    waiting.add("second", "peer", MESSAGE, 1.0)
    assert waiting.deadline() == pytest.approx(1.0 + 4 * 0.9)


def test_a_slow_link_does_not_stay_in_repeating_everything() -> None:
    """Answers that come after the timeout: their age is a bound, and that breaks it."""
    waiting, now, repeated = Retries(1.0), 0.0, []
    for number in range(6):
        waiting.add(number, "peer", MESSAGE, now)
        repeated.append(len(waiting.due(now + 2.9)))
        now += 3.0
        waiting.done(number, now)
    assert repeated == [1, 0, 0, 0, 0, 0]


def test_a_message_that_was_lost_for_long_does_not_make_the_next_ones_wait_as_long() -> None:
    waiting, now = Retries(1.0), 0.0
    waiting.add("first", "peer", MESSAGE, now)
    while now < 3600.0:
        now = waiting.deadline() or 0.0
        waiting.due(now)
    waiting.put_off("first", now + 3.0)
    now += 10.0
    waiting.done("first", now)
    waiting.add("second", "peer", MESSAGE, now)
    assert waiting.deadline() == now + AGE_S_MAX


@pytest.mark.parametrize("is_sent_again_first", [True, False])
def test_who_has_stood_still_does_not_take_his_peers_for_slow(is_sent_again_first: bool) -> None:
    """When he goes on, his deadline has passed, and the answer lies there since long."""
    waiting = Retries(1.0)
    waiting.add("first", "peer", MESSAGE, 0.0)
    if is_sent_again_first:
        waiting.due(10.0)
    waiting.done("first", 10.0)
    waiting.add("second", "peer", MESSAGE, 10.0)
    assert waiting.deadline() == 11.0


def test_after_an_outage_no_pause_is_longer_than_it_takes_to_call_a_message_lost() -> None:
    """Nothing else goes to that peer: nobody hurries what was lost again, and again."""
    waiting, now, pauses = Retries(1.0), 0.0, []
    waiting.add("first", "peer", MESSAGE, now)
    while now < 60.0:
        now = waiting.deadline() or 0.0
        waiting.due(now)
    waiting.done("first", now + 3.0)
    waiting.add("second", "peer", MESSAGE, now)
    for _ in range(4):
        pauses.append((waiting.deadline() or 0.0) - now)
        now += pauses[-1]
        waiting.due(now)
    assert pauses == [pytest.approx(7.0), *[AGE_S_MAX] * 3]


def test_after_an_outage_the_first_answer_hurries_what_else_waits_for_that_peer() -> None:
    waiting = Retries(1.0)
    for key, peer in (("one", "server-0"), ("two", "server-0"), ("three", "server-1")):
        waiting.add(key, peer, MESSAGE, 0.0)
    now = 0.0
    while now < 60.0:
        deadline = waiting.deadline()
        assert deadline is not None
        now = deadline
        waiting.due(now)
    waiting.done("one", now + 0.5)
    assert waiting.deadline() == now + 1.5
    assert [send.peer for send in waiting.due(now + 1.5)] == ["server-0"]


def test_what_was_on_its_way_over_a_connection_that_ended_is_sent_again_over_the_next_one() -> None:
    waiting = Retries(1.0)
    for key, peer, nbytes in (
        ("small", "server-0", 0), ("large", "server-0", 500_000), ("put off", "server-0", 0),
        ("elsewhere", "server-1", 0),
    ):  # fmt: skip
        waiting.add(key, peer, Drain(key), 0.0, nbytes)
    waiting.put_off("put off", 0.5)
    repeated = [send for now in (1.0, 1.5, 3.0, 4.5) for send in waiting.due(now)]
    assert len(repeated) == 6, "all but one, twice"
    waiting.add("later", "server-0", Drain("later"), 6.2)

    def due(now: float) -> list[str]:
        return [str(send.message) for send in waiting.due(now)]

    waiting.again("server-0", until=6.0, now=6.3)
    assert due(6.3) == [str(Drain(key)) for key in ("small", "large", "put off")]
    assert waiting.deadline() == 7.0, (
        "of what is with another peer: only later is it taken for lost"
    )
    assert due(7.2) == [str(Drain("elsewhere")), str(Drain("later"))]
    assert due(7.3) == [str(Drain("small")), str(Drain("put off"))], "as often as at first"


def test_an_outage_says_nothing_of_how_fast_the_link_is_that_it_was_an_outage_of() -> None:
    def timeouts_s(outages: int) -> list[float]:
        waiting, now, found = Retries(1.0), 0.0, []
        for number in range(6):
            for key, nbytes in (("large", 4_000_000), ("small", 0)):
                waiting.add(key, "peer", MESSAGE, now, nbytes)
                if number >= 6 - outages:
                    waiting.due(now + 5.0)
                    waiting.again("peer", until=now + 6.0, now=now + 6.3)
                    waiting.due(now + 6.3)
                    now += 6.3
                now += 0.1
                waiting.done(key, now)
        for key, nbytes in (("large", 4_000_000), ("small", 0)):
            waiting.add(key, "peer", MESSAGE, now, nbytes)
            found.append((waiting.deadline() or 0.0) - now)
        return found

    assert timeouts_s(outages=3) == pytest.approx(timeouts_s(outages=0))


def test_what_the_peer_has_and_cannot_answer_yet_is_not_sent_again_soon() -> None:
    waiting = Retries(1.0)
    waiting.add("key", "peer", MESSAGE, 0.0)
    waiting.put_off("key", 0.5)
    assert waiting.deadline() == 0.5 + PUT_OFF


def test_what_is_held_on_purpose_is_no_round_trip_and_is_sent_again_seldom() -> None:
    waiting = Retries(1.0)
    send_queue = SendQueue(waiting)
    for number in range(5):
        key, now = ("fetch", number), 100.0 * number
        send_queue.queue(key, "server-0", MESSAGE, 0, is_held=True)
        send_queue.flush(now)
        assert waiting.deadline() == now + PUT_OFF
        assert not list(waiting.waiting()), "nobody is late"
        waiting.done(key, now + 5.0)
    waiting.add("next", "server-0", MESSAGE, 500.0)
    assert waiting.deadline() == 501.0
    assert waiting.repeated == 0


def test_repeats_count_towards_the_limit() -> None:
    send_queue = SendQueue(Retries(1.0))
    send_queue.limiters["push"].bytes_per_s = 100.0
    send_queue.queue(("push", 0, 0), "server-0", MESSAGE, 100)
    send_queue.flush(0.0)
    send_queue.retries.due(2.0)
    assert send_queue.limiters["push"].free_at == 3.0


def test_a_large_message_gets_the_time_that_its_bytes_need_on_a_slow_link() -> None:
    waiting = Retries(1.0)
    waiting.add("key", "peer", MESSAGE, 0.0, nbytes=5_000_000)
    assert waiting.deadline() == 6.0


def test_on_a_fast_link_a_large_message_that_was_lost_is_not_missed_for_long() -> None:
    """100 MB on an unknown link are waited for for 100 s; not where they take 0.1 s each time."""
    waiting, now = Retries(1.0), 0.0
    for number in range(20):
        waiting.add(number, "peer", MESSAGE, now, nbytes=100_000_000)
        now += 0.1
        waiting.done(number, now)
    waiting.add("lost", "peer", MESSAGE, now, nbytes=100_000_000)
    deadline = waiting.deadline()
    assert deadline is not None
    assert deadline - now < 2.0


def test_a_link_that_becomes_slow_is_believed_at_once() -> None:
    waiting, now = Retries(1.0), 0.0
    for number in range(50):
        waiting.add(number, "peer", MESSAGE, now, nbytes=10_000_000)
        now += 0.01
        waiting.done(number, now)
    repeats = []
    for number in range(50, 60):
        waiting.add(number, "peer", MESSAGE, now, nbytes=10_000_000)
        repeats.append(len(waiting.due(now + 4.0)))
        now += 5.0
        waiting.done(number, now)
    assert repeats == [1, *[0] * 9]


def carried(bytes_per_s: float, nbytes: int, for_s: float) -> tuple[int, int]:
    """(messages that were answered, copies that were sent) over a link that carries one after the
    other, with as many of them on their way as a worker has pushes.
    """
    waiting = Retries(1.0)
    on_the_way: deque[tuple[float, int]] = deque()
    now = free_at = 0.0
    answered = copies = 0

    def put(number: int) -> None:
        nonlocal free_at, copies
        free_at = max(free_at, now) + nbytes / bytes_per_s
        on_the_way.append((free_at, number))
        copies += 1

    for number in itertools.count():
        if number >= WINDOW:
            while len(list(waiting.waiting())) == WINDOW:
                deadline = waiting.deadline()
                assert deadline is not None
                if deadline < on_the_way[0][0]:
                    now = max(now, deadline)
                    for send in waiting.due(now):
                        assert isinstance(send.message, Lost)
                        put(send.message.number)
                else:
                    now, arrived = on_the_way.popleft()
                    answered += waiting.done(arrived, now) is not None
        if now > for_s:
            return answered, copies
        waiting.add(number, "peer", Lost(number), now, nbytes)
        put(number)
    raise AssertionError


@dataclass(frozen=True)
class Lost(Message):
    """One that says which it is."""

    number: int


@pytest.mark.parametrize(
    ("mb_per_s", "nbytes"),
    [(2.0, 10**7), (1.0, 10**7), (0.7, 10**7), (0.3, 10**7), (0.5, 10**6), (0.1, 10**6)],
)
def test_copies_do_not_fill_a_slow_link_for_good(mb_per_s: float, nbytes: int) -> None:
    answered, copies = carried(mb_per_s * 1e6, nbytes, for_s=4000.0)
    possible = 4000.0 * mb_per_s * 1e6 / nbytes
    assert answered > 0.88 * possible, f"{answered} of {possible:.0f} with {copies} copies"
    assert copies - answered < 30


def test_it_is_known_who_is_waited_for_and_since_when() -> None:
    waiting = Retries(1.0)
    waiting.add("key", "server-1", MESSAGE, 3.0)
    waiting.due(10.0)
    assert list(waiting.waiting()) == [("key", "server-1", 3.0)]


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=50), st.floats(1.0, 1e6))
def test_the_average_is_the_rate_whatever_the_sizes(sizes: list[int], rate: float) -> None:
    limiter, now, sent_at = Limiter(rate), 0.0, []
    for size in sizes:
        now = max(now, limiter.free_at)
        sent_at.append(now)
        limiter.spend(size, now)
    assert sent_at[-1] == pytest.approx(sum(sizes[:-1]) / rate)


def test_no_limit_never_waits() -> None:
    limiter = Limiter()
    limiter.spend(10**12, 0.0)
    assert limiter.free_at == 0.0


def test_a_raised_limit_helps_what_waits_already() -> None:
    limiter = Limiter(100.0)
    limiter.spend(1000, 0.0)
    assert limiter.free_at == 10.0
    limiter.bytes_per_s = 1000.0
    assert limiter.free_at == 1.0
    limiter.bytes_per_s = None
    assert limiter.free_at == 0.0


def test_a_lowered_limit_is_paid_from_then_on() -> None:
    limiter = Limiter(100.0)
    limiter.spend(1000, 0.0)
    limiter.spend(0, 9.0)
    limiter.bytes_per_s = 1.0
    assert limiter.free_at == 9.0 + 100.0
    limiter.bytes_per_s = None
    limiter.spend(10**9, 10.0)
    limiter.spend(0, 11.0)
    limiter.bytes_per_s = 1.0
    assert limiter.free_at == 11.0, "what was sent without a limit is not owed"


def test_a_pause_saves_up_no_burst() -> None:
    limiter = Limiter(100.0)
    limiter.spend(100, 1000.0)
    assert limiter.free_at == 1001.0


def test_what_waits_for_a_limit_is_counted() -> None:
    send_queue = SendQueue(Retries(1.0))
    send_queue.limiters["push"].bytes_per_s = 10.0
    for number in range(3):
        send_queue.queue(("push", number), "server-0", MESSAGE, 100)
    send_queue.flush(0.0)
    assert send_queue.waiting(0.0) == {"push_waiting_bytes": 300}
    assert send_queue.waiting(4.0) == {"push_waiting_bytes": 260}
    send_queue.limiters["push"].bytes_per_s = None
    assert send_queue.waiting(4.0) == {}, "there is no limit"


def test_the_outbox_holds_back_one_direction_and_not_the_other() -> None:
    send_queue = SendQueue(Retries(1.0))
    send_queue.limiters["push"].bytes_per_s = 10.0
    for number in range(3):
        send_queue.queue(("push", number), "server-0", MESSAGE, 100)
        send_queue.queue(("fetch", number), "server-0", MESSAGE, 100)
    assert len(send_queue.flush(0.0)) == 1 + 3
    assert send_queue.deadline() == 10.0
    assert len(send_queue.flush(10.0)) == 1


def test_latencies_are_quantiles_of_the_recent_ones() -> None:
    latency = Latency()
    assert latency.quantiles_ms("push") == {}
    for ms in range(1, 101):
        latency.add(ms / 1e3)
    assert latency.quantiles_ms("push") == {"push_ms_p50": 50.0, "push_ms_p99": 100.0}


def test_rates_are_growth_over_time() -> None:
    rates = Rates("bytes")
    rates.add("bytes", 100)
    assert rates.report(10.0) == {"bytes": 100}
    rates.add("bytes", 50)
    assert rates.report(12.0) == {"bytes": 150, "bytes_per_s": 25.0}
    assert rates.report(12.01) == {"bytes": 150, "bytes_per_s": 25.0}


def test_staleness_is_counted_in_powers_of_two() -> None:
    staleness = Staleness()
    assert staleness.report() == {}
    for value in (0, 1, 1, 2, 3, 5):
        staleness.add(value)
    counted = {"0": 1, "1": 2, "2-3": 2, "4-7": 1}
    assert staleness.report() == {"staleness": counted, "staleness_mean": 2.0}
