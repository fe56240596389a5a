"""Events of the thread that computes: handled there while the loop waits, in order, never lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from daemons.loop import Loop
from dlctl.wire.machine import DeadlineReached, Effect, Event, Exit, Started

LIMIT_S = 30.0
"""For what takes a millisecond; a wake-up that is lost would take an hour."""


@dataclass(frozen=True)
class Begin(Effect):
    """Performed by starting the other thread."""


@dataclass(frozen=True)
class Say(Effect):
    text: str


@dataclass(frozen=True)
class Own(Effect):
    """What any thread may perform."""

    number: int


@dataclass(frozen=True)
class Did(Event):
    number: int


class Waiting(Loop):
    """Says when it has come to where it only waits, and wakes up no sooner than it may."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.may_wake_up = threading.Event(), threading.Event()

    def _wait(self, deadline: float | None) -> list[object]:
        self.waits.set()
        ready = super()._wait(deadline)
        assert self.may_wake_up.wait(LIMIT_S)
        return ready


class Other:
    """A machine that answers as its test lists, a loop for it, and what happened in which order."""

    def __init__(self, answers: dict[int, list[Effect]]) -> None:
        self.answers = answers
        self.loop = Waiting()
        self.loop.perform(Begin, lambda _: self._thread.start())
        self.loop.perform(Say, lambda effect: self.note(effect.text))
        self.loop.perform(Own, lambda effect: self.note(f"own {effect.number}"), anywhere=True)
        self.story: list[str] = []
        self.at: float | None = None
        """The machine's deadline."""
        self._thread = threading.Thread(target=self._work)

    def note(self, text: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self.story.append(text if is_main else f"{text} there")

    def run(self, offers: Callable[[], object]) -> int:
        """`offers` is called in the other thread when the loop waits; then the loop may wake up."""
        self.offers = offers
        watchdog = threading.Timer(LIMIT_S, self.loop.fail, [TimeoutError("nobody woke the loop")])
        watchdog.start()
        try:
            return self.loop.run(self)
        finally:
            watchdog.cancel()
            self._thread.join()

    def _work(self) -> None:
        assert self.loop.waits.wait(LIMIT_S)
        try:
            self.offers()
        finally:
            self.loop.may_wake_up.set()

    def offer(self, number: int) -> None:
        self.loop.offer(Did(number))

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Started):
            return [Begin()]
        if isinstance(event, DeadlineReached):
            self.at = None
            return [Exit(0, "its time has come")]
        assert isinstance(event, Did)
        self.note(f"handles {event.number}")
        return self.answers[event.number]

    def deadline(self) -> float | None:
        return self.at


def test_the_thread_performs_what_it_may_and_the_loop_the_rest_each_in_order():
    it = Other({1: [Say("a"), Own(1), Say("b"), Own(2), Exit(3, "done")]})
    assert it.run(lambda: it.offer(1)) == 3
    assert it.story == ["handles 1 there", "own 1 there", "own 2 there", "a", "b"]


def test_one_effect_after_the_other_that_it_may_perform_needs_no_other_thread():
    it = Other({1: [Own(1)], 2: [Own(2)], 3: [Exit(0, "done")]})
    it.run(lambda: [it.offer(number) for number in (1, 2, 3)])
    assert it.story == [
        "handles 1 there", "own 1 there", "handles 2 there", "own 2 there", "handles 3 there",
    ]  # fmt: skip


def test_nothing_is_handled_before_what_was_wanted_before_is_performed():
    it = Other({1: [Say("a"), Own(1)], 2: [Say("b"), Own(2), Exit(0, "done")]})
    it.run(lambda: [it.offer(1), it.offer(2)])
    assert it.story == ["handles 1 there", "own 1 there", "a", "handles 2", "b", "own 2"]


def test_who_was_there_first_is_handled_first():
    it = Other({1: [Say("a")], 2: [Own(2), Exit(0, "done")]})

    def offers() -> None:
        it.loop.post(Did(1))  # Of a signal, or of another thread.
        it.offer(2)

    it.run(offers)
    assert it.story == ["handles 1", "a", "handles 2", "own 2"]


def test_nobody_else_is_heard_while_the_loop_performs_effects():
    it = Other({1: [Say("a"), Say("b")], 2: [Own(2), Exit(0, "done")]})
    performs, offered = threading.Event(), threading.Event()

    def perform(effect: Say) -> None:
        performs.set()
        assert offered.wait(LIMIT_S)
        it.note(effect.text)

    def offers() -> None:
        it.loop.post(Did(1))
        it.loop.may_wake_up.set()
        assert performs.wait(LIMIT_S)
        it.offer(2)
        offered.set()

    it.loop.perform(Say, perform)
    it.run(offers)
    assert it.story == ["handles 1", "a", "b", "handles 2", "own 2"]


def test_a_deadline_that_is_sooner_wakes_the_loop():
    it = Other({1: [Own(1)]})

    def offers() -> None:
        it.at = 0.0
        it.offer(1)

    assert it.run(offers) == 0


def test_a_machine_that_fails_there_ends_the_loop_with_its_error():
    it = Other({})
    with pytest.raises(KeyError, match="1"):
        it.run(lambda: it.offer(1))


def test_after_the_end_nothing_is_handled_any_more():
    it = Other({1: [Exit(0, "done"), Own(1)]})
    it.run(lambda: it.offer(1))
    it.offer(2)
    assert it.story == ["handles 1 there", "own 1 there"]


def test_before_the_beginning_it_waits():
    it = Other({1: [Own(1)], 2: [Exit(0, "done")]})
    it.offer(1)
    it.run(lambda: it.offer(2))
    assert it.story == ["handles 1", "own 1", "handles 2"]


# ---------------------------------------------------------------- many at once

OFFERS, POSTS = 3000, 500


class Busy:
    """A machine that numbers what it wants, and looks that nobody else is in it."""

    def __init__(self) -> None:
        self.wanted = self.offers = 0
        self.posts = [0, 0]
        self._inside = threading.Lock()

    def handle(self, event: Event, now: float) -> list[Effect]:
        assert self._inside.acquire(blocking=False)
        try:
            return self._handle(event)
        finally:
            self._inside.release()

    def _handle(self, event: Event) -> list[Effect]:
        if isinstance(event, Started):
            return [Begin(), Own(0)]
        assert isinstance(event, Did)
        if event.number < 0:  # Of one of the two who post: -1, -2, ... or -10001, -10002, ...
            who, number = divmod(-event.number, 10_000)
            self.posts[who] += 1
            assert number == self.posts[who]
            return self._want()
        assert event.number == self.offers
        self.offers += 1
        before = self._want() if self.offers % 7 == 0 else []
        after = self._want() if self.offers % 5 == 0 else []
        return [*before, Own(self.offers), *after]

    def _want(self) -> list[Effect]:
        is_over = (self.offers, self.posts) == (OFFERS, [POSTS, POSTS])
        self.wanted += 1
        return [Say(str(self.wanted)), *([Exit(0, "all has come")] if is_over else [])]

    def deadline(self) -> float | None:
        return None


def test_nothing_is_lost_or_comes_in_another_order_whoever_meets_whom():
    loop, machine = Loop(), Busy()
    work: queue.SimpleQueue[Own | None] = queue.SimpleQueue()
    said: list[int] = []

    def compute() -> None:
        while (own := work.get()) is not None:
            if own.number < OFFERS:
                loop.offer(Did(own.number))

    def post(who: int) -> None:
        for number in range(1, POSTS + 1):
            loop.post(Did(-10_000 * who - number))

    threads = [threading.Thread(target=compute)]
    threads += [threading.Thread(target=post, args=(who,)) for who in (0, 1)]
    loop.perform(Begin, lambda _: [thread.start() for thread in threads])
    loop.perform(Own, work.put, anywhere=True)
    loop.perform(Say, lambda effect: said.append(int(effect.text)))
    assert loop.run(machine) == 0
    work.put(None)
    for thread in threads:
        thread.join()
    assert (machine.offers, machine.posts) == (OFFERS, [POSTS, POSTS])
    assert said == [*range(1, machine.wanted + 1)]
