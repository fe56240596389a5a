"""One process in virtual time: a machine, its timer, and its faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from dlctl.errors import DlctlError
from dlctl.sim.network import SimNetwork
from dlctl.sim.timeline import Timeline
from dlctl.util.names import HOME_AGENT
from dlctl.wire.machine import (
    Admit,
    Coming,
    Configure,
    Connect,
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Machine,
    Mute,
    Note,
    Peer,
    Received,
    Reconnected,
    Send,
    StopRequested,
)
from dlctl.wire.messages import Message

SPINS_MAX = 3
"""Successive deadlines that may be in the past: with more the real loop would be a busy loop."""
LAST_LINES = 12


class Spinning(AssertionError):
    """A machine returns a deadline that has passed, and does not handle it."""


class Crashed(BaseException):
    """This process is killed here, in the middle of its machine's code. No role may catch it."""


class Observer(Protocol):
    """A read-only observer: the checkers, and faults that wait for their moment."""

    def on_effect(self, process: Process, effect: Effect) -> None:
        """An effect is about to be performed."""
        ...

    def on_message(self, process: Process, peer: Peer, message: Message) -> None:
        """A message is about to be passed to the machine."""
        ...


class Process:
    """An incarnation of a daemon. Its clock runs `clock_s` ahead of the timeline: times of
    different processes must not be compared."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        timeline: Timeline,
        network: SimNetwork,
        clock_s: float,
        note: Callable[[str], None],
        pid: int = 0,
        secret: str = "",
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.pid = pid
        self.secret = secret
        self.coordinator_key = ""
        """The public key of the coordinator, for this process and those it starts."""
        self.admitted: Mapping[str, str] = {}
        self.agent = HOME_AGENT
        """The agent that has started it, or its own name: processes of one agent share a host."""
        self.timeline = timeline
        self.network = network
        self.alive = True
        self.frozen = False
        self.given_up = False
        """All other processes consider this one dead, though it may only be frozen."""
        self.observers: list[Observer] = []
        self.ended: Callable[[int], None] = lambda status: None
        """Called once, with the exit status."""
        self.log = bytearray()
        """The daemon's log file; `last_lines` are its last lines."""
        self.log_at: list[float] = []
        """When each line of the log was written, in seconds of the timeline."""
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.acks = b""
        """A worker's record of what was settled."""
        self.exit_code: int | None = None
        self.status: int | None = None
        """The exit status; None while the process is alive."""
        self.machine: Machine
        self._clock_s = clock_s
        self._note = note
        self._performers: dict[type[Effect], Callable[[Any], None]] = {
            Send: lambda e: network.send(self, e.peer, e.message),
            Connect: lambda e: network.connect(self, e.peer, e.address, e.key),
            Admit: self._admit,
            Mute: lambda e: note(f"{self} does not hear {e.name} for {e.for_s:g} s"),
            Note: self._write,
            Configure: lambda e: note(f"{self} sets {e.key} {e.value}"),
            Exit: self.leave,
        }
        self.schedule: Callable[[Event, Callable[[], None]], None] = lambda event, handle: handle()
        """Calls `handle` when the daemon has had the time to handle the event: at once, unless a
        simulation has a model of that (`handling.py`)."""
        self._is_ringing = False
        """A deadline has passed, and is to be handled."""
        self._missed: list[Event] = []
        self._timer: float | None = None
        self._spins = 0

    def __str__(self) -> str:
        return f"{self.name}.{self.incarnation}"

    def perform(self, kind: type[Effect], how: Callable[[Any], None]) -> None:
        """Register the handler of a kind of effect that only this daemon has."""
        self._performers[kind] = how

    def clock(self) -> float:
        return self.timeline.now + self._clock_s

    # ------------------------------------------------------------ events

    def post(self, event: Event, delay_s: float = 0.0) -> None:
        """Pass an event to the machine after a delay."""
        self.timeline.after(delay_s, lambda: self._take(event))

    def deliver(self, peer: Peer, message: Message, identity: str = "") -> None:
        self._take(Received(peer, message, identity))

    def deliver_part(self, part: Coming) -> None:
        self._take(part)

    def reconnected(self, peer: str, after_s: float) -> None:
        """A connection was closed just now; the next one is established after a delay."""
        self.post(Reconnected(peer, self.clock()), after_s)

    def _take(self, event: Event) -> None:
        if self.alive:
            self.schedule(event, lambda: self.handle_now(event))

    def handle_now(self, event: Event) -> None:
        """Pass an event to the machine; later if the process is frozen."""
        if not self.alive:
            return
        if self.frozen:
            self._missed.append(event)
            return
        self._spins = 0
        self._handle(event, self.clock())

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Received):
            for observer in self.observers:
                observer.on_message(self, event.peer, event.message)
            if not self.alive:
                return
        for effect in self._effects(event, now):
            for observer in self.observers:
                observer.on_effect(self, effect)
                if not self.alive:
                    return
            self._performers[type(effect)](effect)
        if self.exit_code is not None:
            self.end(self.exit_code)
        elif self.alive:
            self._arm()

    def _effects(self, event: Event, now: float) -> list[Effect]:
        """The effects of the machine; none if the process was killed meanwhile."""
        try:
            return self.machine.handle(event, now)
        except Crashed as crash:
            self.crash(crash)
        return []

    def crash(self, crash: Crashed) -> None:
        self._note(f"{self} crashes at {crash}")
        self.end(-9)

    def fail(self, error: DlctlError) -> None:
        """End by an error that no machine handles, as a real process does."""
        self._write(Note("error", error.message))
        self.end(error.exit_code)

    def _admit(self, effect: Admit) -> None:
        self.admitted = effect.names

    def _write(self, effect: Note) -> None:
        self._note(f"{self} {effect.level}: {effect.text}")
        line = f"{effect.level.upper()} {effect.text}"
        self.write_log(line)
        self.last_lines.append(line)

    def write_log(self, line: str) -> None:
        """line: "INFO text"."""
        self.log += f"{line}\n".encode()
        self.log_at.append(self.timeline.now)

    def dated_log(self) -> Iterator[tuple[float, str]]:
        """(seconds of the timeline, line)."""
        yield from zip(self.log_at, self.log.decode().splitlines(), strict=False)

    def leave(self, effect: Exit) -> None:
        """Exit in an orderly way, after all effects of this event."""
        self._note(f"{self} exits {effect.code}: {effect.reason}")
        self.write_log(f"INFO exit {effect.code}: {effect.reason}")
        self.exit_code = effect.code

    # ------------------------------------------------------------ the timer

    def _arm(self) -> None:
        deadline = self.machine.deadline()
        if deadline is None:
            self._timer = None
            return
        when = deadline - self._clock_s
        if self._is_ringing:
            return
        if self._timer is None or when < self._timer:
            self._timer = when
            self.timeline.at(when, lambda: self._ring(when))

    def _ring(self, when: float) -> None:
        if when != self._timer or not self.alive or self.frozen:
            return
        self._timer, self._is_ringing = None, True
        self.schedule(DeadlineReached(), self._handle_deadline)

    def _handle_deadline(self) -> None:
        self._is_ringing = False
        if not self.alive or self.frozen:
            return
        deadline = self.machine.deadline()
        if deadline is None:
            return
        if deadline - self._clock_s > self.timeline.now:
            self._arm()
            return
        self._spins += 1
        if self._spins > SPINS_MAX:
            raise Spinning(f"{self} at {self.timeline.now:.3f} s: its deadline stays in the past")
        self._handle(DeadlineReached(), max(self.clock(), deadline))
        if self.alive and not self._is_due():
            self._spins = 0

    def _is_due(self) -> bool:
        deadline = self.machine.deadline()
        return deadline is not None and deadline - self._clock_s <= self.timeline.now

    # ------------------------------------------------------------ faults

    def freeze(self) -> None:
        """SIGSTOP: it is alive but paused; its input is queued."""
        if self.alive and not self.frozen:
            self._note(f"{self} is frozen")
            self.frozen = True

    def thaw(self) -> None:
        if self.alive and self.frozen:
            self._note(f"{self} thaws")
            self.frozen = False
            # Its deadline may have passed long ago, and its queued input is not handled yet.
            self._timer = None
            self._arm()
            missed, self._missed = self._missed, []
            for event in missed:
                self.post(event)

    def signal(self, number: int) -> None:
        if number == 9:
            self.end(-9)
        else:
            self.post(StopRequested(f"signal {number}"))

    def end(self, status: int) -> None:
        """The process is gone, with all of its state."""
        if self.alive:
            self._note(f"{self} ended: {status}")
            self.alive, self.status = False, status
            self.network.forget(self)
            self.ended(status)
