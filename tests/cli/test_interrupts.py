"""Signals that ask for the end: each one counts, and none comes where it would do harm."""

from __future__ import annotations

import hashlib
import os
import signal
import threading

import pytest

from dlctl.cli.ui.interrupts import Interrupted, Interrupts

APART_S = 0.02
ROUNDS = 600_000
"""Of a hash: about a third of a second in one call into C, in which no handler can run."""


def _press(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_a_signal_waits_until_it_does_no_harm() -> None:
    with Interrupts() as interrupts:
        _press(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            interrupts.arm()
    assert caught.value.signal == signal.SIGINT


def test_the_second_signal_does_not_break_off_what_handles_the_first() -> None:
    with Interrupts() as interrupts:
        interrupts.arm()
        with pytest.raises(Interrupted) as first:
            _press(signal.SIGINT)
        _press(signal.SIGTERM)
        with pytest.raises(Interrupted) as second:
            interrupts.arm()
    assert [first.value.signal, second.value.signal] == [signal.SIGINT, signal.SIGTERM]


def test_two_signals_during_one_call_into_c_are_two() -> None:
    """The interpreter runs the handler once for both."""
    apart = threading.Event()

    def press() -> None:
        _press(signal.SIGINT)
        apart.wait(APART_S)
        _press(signal.SIGINT)

    with Interrupts() as interrupts:
        thread = threading.Timer(APART_S, press)
        thread.start()
        hashlib.pbkdf2_hmac("sha256", b"long", b"call", ROUNDS)
        thread.join()
        for _ in range(2):
            with pytest.raises(Interrupted):
                interrupts.arm()
        interrupts.arm()


def test_a_disarmed_signal_is_not_heard() -> None:
    with Interrupts() as interrupts:
        interrupts.arm()
        interrupts.disarm()
        _press(signal.SIGINT, signal.SIGHUP)


def test_afterwards_everything_is_as_before() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) not in handlers
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_under_nohup_the_terminal_may_close() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.arm()
            _press(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
