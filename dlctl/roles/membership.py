"""The daemons of a run, as the coordinator knows them: one record each, and its incarnations.

The name stays for the life of the run. An incarnation is one process under that name; what an older
incarnation says is no longer heard.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlctl.machine import Peer
from dlctl.messages import Json

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0


_SHOWN = (
    "name", "role", "host", "pid", "state", "phase", "waiting_for", "waiting_since", "incarnation",
    "restarts", "started_at", "retry_at", "last_exit", "error", "settings", "metrics",
)  # fmt: skip


@dataclass(slots=True)
class Daemon:
    name: str
    role: str
    index: int
    incarnation: int = 0
    state: str = "pending"
    """pending starting running slow backoff draining stopped failed unknown."""
    phase: str = ""
    waiting_for: str = ""
    waiting_since: float | None = None
    host: str = ""
    pid: int | None = None
    peer: Peer | None = None
    """The connection that its last message came over."""
    heard_at: float = 0.0
    started_at: float | None = None
    restarts: int = 0
    retry_at: float | None = None
    last_exit: Json | None = None
    error: str = ""
    """The user's error, when it has sent one."""
    term: int = 0
    """Epoch of a worker's slot, generation of a server's shard."""
    settings: Json = field(default_factory=dict)
    """Live settings that differ from the job file."""
    metrics: Json = field(default_factory=dict)
    address: str = ""
    registered: bool = False
    model_ready: bool = False
    has_worked: bool = False
    """An incarnation of this execution has come to work, with the residual of before."""
    asked_for_data: bool = False
    drained: bool = False

    @property
    def alive(self) -> bool:
        """There is a process, as far as we know."""
        return self.state in ("starting", "running", "slow", "draining")

    def begin(self, now: float) -> None:
        """A new incarnation is being started."""
        self.incarnation += 1
        self.state, self.phase, self.waiting_for = "starting", "starting", ""
        self.peer = self.pid = self.retry_at = self.waiting_since = None
        self.heard_at = self.started_at = now
        self.metrics, self.error = {}, ""
        self.address = ""
        self.registered = self.model_ready = self.asked_for_data = self.drained = False

    def heard(self, peer: Peer, now: float) -> None:
        self.peer, self.heard_at = peer, now

    def report(self, phase: str, waiting_for: str, now: float) -> None:
        if waiting_for != self.waiting_for:
            self.waiting_since = now if waiting_for else None
        self.phase, self.waiting_for = phase, waiting_for

    def ended(self, status: int, last_lines: tuple[str, ...], now: float, cause: str = "") -> None:
        self.state = "stopped" if status == 0 else "failed"
        self.phase, self.waiting_for, self.waiting_since = "", "", None
        self.pid = self.peer = None
        text = describe_exit(status, cause)
        self.last_exit = {"code": status, "text": text, "at": now, "last_lines": list(last_lines)}

    def back_off(self, now: float) -> None:
        """Wait before the next incarnation; twice as long each time."""
        self.restarts += 1
        delay_s = min(BACKOFF_FIRST_S * 2 ** (self.restarts - 1), BACKOFF_MAX_S)
        self.state, self.retry_at = "backoff", now + delay_s

    def to_json(self) -> Json:
        """The row that `status` reads."""
        return {key: getattr(self, key) for key in _SHOWN} | {"updated_at": self.heard_at}


_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM",
}  # fmt: skip


def describe_exit(status: int, cause: str = "") -> str:
    """An exit status in words, with what is known (and never guessed) of why a signal came."""
    if status >= 0:
        return f"exit {status}" + (" (fenced: replaced by a newer process)" if status == 75 else "")
    name = _SIGNALS.get(-status, f"signal {-status}")
    return f"killed by {name}" + (f" ({cause})" if cause else "")


class Membership:
    def __init__(self, servers: int, workers: int, before: dict[str, int]) -> None:
        """`before`: incarnations that earlier executions of this run have used."""
        named = [("agent-0", "agent", 0)]
        named += [(f"server-{i}", "server", i) for i in range(servers)]
        named += [(f"worker-{i}", "worker", i) for i in range(workers)]
        self.daemons = {
            name: Daemon(name, role, index, before.get(name, 0)) for name, role, index in named
        }

    def get(self, name: str, incarnation: int | None = None) -> Daemon | None:
        """A daemon by name; None if unknown, or if it is not this incarnation any more."""
        daemon = self.daemons.get(name)
        if daemon is None or (incarnation is not None and daemon.incarnation != incarnation):
            return None
        return daemon

    def of(self, role: str) -> list[Daemon]:
        return [d for d in self.daemons.values() if d.role == role]

    def worker(self, slot: int, epoch: int) -> Daemon | None:
        """The worker that lives and has this slot in this epoch, or None.

        A dead worker's last messages may still be under way when its exit is known.
        """
        daemon = self.daemons.get(f"worker-{slot}")
        if daemon is None or not daemon.alive or not daemon.registered:
            return None
        return daemon if daemon.term == epoch else None

    def live_slots(self) -> tuple[int, ...]:
        """Slots that take part: their process lives, has come to work, and is not drained."""
        return tuple(
            d.index for d in self.of("worker") if d.alive and d.asked_for_data and not d.drained
        )

    def waiting(self) -> list[Any]:
        return [d for d in self.daemons.values() if d.alive and d.waiting_for]
