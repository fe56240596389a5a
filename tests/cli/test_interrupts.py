"""Signals that ask for the end: each one counts, and none comes where it would do harm."""

from __future__ import annotations

import os
import signal

import pytest

from dlctl.cli.ui.interrupts import Interrupted, caught


def _press(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_a_signal_waits_until_it_does_no_harm() -> None:
    with caught() as interrupts:
        _press(signal.SIGINT)
        with pytest.raises(Interrupted) as first, interrupts.armed():
            pass
    assert first.value.signal == signal.SIGINT


def test_the_second_signal_does_not_break_off_what_handles_the_first() -> None:
    with caught() as interrupts:
        with pytest.raises(Interrupted) as first, interrupts.armed():
            _press(signal.SIGINT)
        _press(signal.SIGTERM)
        with pytest.raises(Interrupted) as second, interrupts.armed():
            pass
    assert [first.value.signal, second.value.signal] == [signal.SIGINT, signal.SIGTERM]


def test_a_disarmed_signal_is_not_heard() -> None:
    with caught() as interrupts:
        with interrupts.armed():
            pass
        _press(signal.SIGINT, signal.SIGHUP)


def test_afterwards_everything_is_as_before() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with caught():
        assert signal.getsignal(signal.SIGINT) not in handlers
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_under_nohup_the_terminal_may_close() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with caught() as interrupts, interrupts.armed():
            _press(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
