"""The event loop of a daemon: wait for messages, threads, signals or the machine's deadline;
perform effects.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq

from daemons.time_records import LoopClock, TimesFile
from daemons.transport.sockets import Transport
from dlctl.records.work_times import WorkTimes
from dlctl.wire.machine import (
    Admit,
    Configure,
    Connect,
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Machine,
    Mute,
    Note,
    Send,
    Started,
    StopRequested,
)

log = logging.getLogger("dlctl")
WAIT_S_MAX = 3600.0
CHORES_S = 1.0
ENDING = (signal.SIGTERM, signal.SIGINT)
SIGNALS_READ = 4096


class Signals:
    """SIGTERM and SIGINT as a file descriptor to watch. Must be created in the main thread; a
    signal is readable at once, even while that thread is busy.
    """

    def __init__(self) -> None:
        self.fd, self._theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._theirs, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._on_signal) for number in ENDING}
        os.register_at_fork(
            before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING),
            after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING),
            after_in_child=partial(_leave, before),
        )

    def _on_signal(self, number: int, _: object) -> None:
        """Write the signal again: the task's own event loop may have replaced the wakeup fd."""
        with suppress(OSError):
            os.write(self._theirs, bytes([number]))

    def read(self) -> list[str]:
        """The names of received signals, some twice, once there are any. Others are ignored."""
        came = os.read(self.fd, SIGNALS_READ)
        return [signal.Signals(number).name for number in came if number in ENDING]


def _leave(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restore the signal handlers in a process that the task has forked."""
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


class Loop:
    """Runs one machine. `perform` registers the effects that are specific to a daemon.

    `chores` are called after events, at most once a second.
    """

    def __init__(self, *chores: Callable[[], None], secret: str = "") -> None:
        """`secret`: this daemon's key, if its connections have keys."""
        self._chores_at = 0.0
        self.poller = zmq.Poller()
        self.transport = Transport(self.poller, secret)
        self.chores = [*chores, self.transport.check]
        self.endings: list[Callable[[], None]] = []
        """Called once, when the machine has exited and the connections are still open."""
        self.clock = LoopClock()
        self.exit_code: int | None = None
        self.after_events: Callable[[], None] = lambda: None
        """Called when all pending events are handled, before waiting again."""
        self._performers: dict[type[Effect], Callable[[Any], object]] = {
            Send: lambda e: self.transport.send(e.peer, e.message),
            Connect: lambda e: self.transport.connect(e.peer, e.address, e.key),
            Admit: lambda e: self.transport.admit(e.names),
            Mute: lambda e: self.transport.mute(e.name, e.for_s),
            Note: _write_note,
            Configure: _configure,
            Exit: self._exit,
        }
        self._anywhere: set[type[Effect]] = set()
        self._machine: Machine | None = None
        self._turn = threading.Lock()
        """Held while the machine handles events and their effects are performed."""
        self._unperformed: deque[Effect] = deque()
        """Effects of events that were handled in another thread; the loop performs them."""
        self._waits_until: float | None = None
        self._posted: deque[Event] = deque()
        self._failure: Exception | None = None
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: dict[int, Callable[[], None]] = {}
        self.poller.register(self._wakeup, zmq.POLLIN)

    # ------------------------------------------------------------ from outside the loop

    def perform(
        self, kind: type[Effect], how: Callable[[Any], object], *, anywhere: bool = False
    ) -> None:
        """Register how to perform effects of a kind that only this daemon has. anywhere: also in
        the thread that offers the event, as the effect only wakes up another thread.
        """
        self._performers[kind] = how
        if anywhere:
            self._anywhere.add(kind)

    def post(self, event: Event) -> None:
        """Queue an event for the machine; safe in any thread and in signal handlers."""
        self._posted.append(event)
        os.eventfd_write(self._wakeup, 1)

    def offer(self, event: Event) -> None:
        """Pass an event to the machine from another thread: at once if the loop is idle, to avoid
        a thread switch. Effects that may be performed anywhere are performed here, in their order;
        the loop performs the rest before the machine handles another event.
        """
        if self._turn.acquire(blocking=False):
            try:
                is_busy = self._posted or self._unperformed or self.exit_code is not None
                if self._machine is not None and not is_busy:
                    self._handle_here(self._machine, event)
                    return
            except Exception as error:
                self.fail(error)
                return
            finally:
                self._turn.release()
        self.post(event)

    def _handle_here(self, machine: Machine, event: Event) -> None:
        with self.clock.handling(event):
            for effect in self._effects(machine, event):
                if type(effect) in self._anywhere:
                    self._performers[type(effect)](effect)
                else:
                    self._unperformed.append(effect)
        deadline, until = machine.deadline(), self._waits_until
        is_sooner = deadline is not None and (until is None or deadline < until)
        if self._unperformed or is_sooner:
            os.eventfd_write(self._wakeup, 1)

    def record_times(
        self, path: Path, work: Mapping[str, WorkTimes] = MappingProxyType({})
    ) -> None:
        """Record in this file where the time goes, until the loop ends. work: of other threads."""
        file = TimesFile(path, self.clock, work)
        self.chores.append(file.write_if_due)
        self.endings.append(file.write)

    def fail(self, error: Exception) -> None:
        """Make `run` raise this error; thread-safe."""
        self._failure = error
        os.eventfd_write(self._wakeup, 1)

    def stop_on_signals(self, signals: Signals | None = None) -> None:
        """Turn SIGTERM and SIGINT into events for the machine. signals: required if the loop does
        not run in the main thread.
        """
        heard = signals or Signals()

        def request_stop() -> None:
            for name in heard.read():
                self.post(StopRequested(name))

        self.watch(heard.fd, request_stop)

    def watch(self, fd: int, ready: Callable[[], None]) -> None:
        """Call `ready` when `fd` is readable (a pidfd: when the process has exited)."""
        self._watched[fd] = ready
        self.poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._watched.pop(fd, None)
        self.poller.unregister(fd)

    # ------------------------------------------------------------ the loop

    def run(self, machine: Machine) -> int:
        """Run until the machine exits; returns its exit code. Raises the error passed to `fail`."""
        self._machine, ready = machine, list[Any]()
        self.clock.begin()
        try:
            with self._turn:
                self._handle(machine, Started())
            while self.exit_code is None:
                with self._turn:
                    self._waits_until = self._work_off(machine, ready)
                ready = self._wait(self._waits_until) if self.exit_code is None else []
            self.after_events()
            for ending in self.endings:
                ending()
        finally:
            self.transport.close()
        return self.exit_code

    def _work_off(self, machine: Machine, ready: list[Any]) -> float | None:
        """Handle all pending work. Returns the machine's next deadline."""
        while self._unperformed:
            effect = self._unperformed.popleft()
            self._performers[type(effect)](effect)
        for source in ready:
            if self.exit_code is None:
                self._serve(machine, source)
        if self.exit_code is None and time.monotonic() >= self._chores_at:
            self._chores_at = time.monotonic() + CHORES_S
            for chore in self.chores:
                chore()
        deadline = machine.deadline()
        if deadline is not None and deadline <= time.monotonic():
            self._handle(machine, DeadlineReached())
            deadline = machine.deadline()
        self.after_events()
        self.transport.bulk.give_back()
        return deadline

    def _wait(self, deadline: float | None) -> list[Any]:
        timeout_s = WAIT_S_MAX if deadline is None else deadline - time.monotonic()
        # Rounded up to avoid a busy loop in the last fraction of a millisecond.
        timeout_ms = int(min(max(timeout_s, 0.0), WAIT_S_MAX) * 1000) + (timeout_s > 0)
        return [source for source, _ in self.poller.poll(timeout_ms)]

    def _serve(self, machine: Machine, source: Any) -> None:
        if source == self._wakeup:
            os.eventfd_read(self._wakeup)
            if self._failure is not None:
                raise self._failure
            while self._posted:
                self._handle(machine, self._posted.popleft())
        elif source in self._watched:
            self._watched[source]()
        elif not isinstance(source, int) and not source.closed:  # It may be unwatched by now.
            for event in self.transport.receive(source):
                self._handle(machine, event)

    def _handle(self, machine: Machine, event: Event) -> None:
        """Handle an event and perform its effects, unless the machine has exited."""
        if self.exit_code is not None:
            return
        with self.clock.handling(event):
            for effect in self._effects(machine, event):
                self._performers[type(effect)](effect)

    def _effects(self, machine: Machine, event: Event) -> Sequence[Effect]:
        """Handle an event. Release received pages before a step, which may need the memory."""
        effects = machine.handle(event, time.monotonic())
        self.transport.bulk.borrower.drop_pages()
        return effects

    def _exit(self, effect: Exit) -> None:
        log.info("exit %d: %s", effect.code, effect.reason)
        self.exit_code = effect.code


def _write_note(note: Note) -> None:
    log.log(logging.getLevelNamesMapping()[note.level.upper()], note.text, extra=dict(note.fields))


def _configure(effect: Configure) -> None:
    if effect.key == "log_level":
        log.setLevel(effect.value.upper())
