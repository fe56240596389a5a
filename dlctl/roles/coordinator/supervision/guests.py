"""Workers that come from anywhere: invitations, the line for a slot, and how guests come and go.

An invitation is a key pair and a slot. Its guest (`dlctl join`, `roles/agent/guest.py`) connects
with that key, and asks for its slot; the worker that it starts has another key, derived from the
same invitation, so that both end with it. At most `workers.max` workers have a slot at a time, the
agents' ones included; other guests wait in line.

That a guest comes or goes is no failure. A lost connection is only a hint: a guest is gone when it
says goodbye, or is silent for `silent_s`. Then its worker's portions are leased again, and its slot
is free. When it returns, its worker gets a new term. The coordinator restarts nothing there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dlctl.errors import DlctlError
from dlctl.records.memory import INVITATION, Entry, Memory
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.remote_files import LogMirror
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.supervision.registration import Past, Registration
from dlctl.roles.coordinator.supervision.scaling import REMOVAL, Scaling
from dlctl.roles.coordinator.training.scaled_rate import ScaledRate
from dlctl.roles.protocol.authz import GUEST, WORKER
from dlctl.roles.protocol.files import Transfers
from dlctl.util.text import plural
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json, Request

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,62}[A-Za-z0-9])?", re.ASCII)
SERIAL = re.compile(r"[0-9a-f]{16}", re.ASCII)
INVITATIONS_MAX = 1000
"""Those that have ended count, too."""
NEW_KEYS = "the run has new keys"


@dataclass(frozen=True, slots=True)
class Invitation:
    slot: int
    serial: str
    """Its keys are derived from this, and from the run's key."""
    expires: float
    """Seconds since 1970."""
    ended: str = ""
    """Why it is not valid any more; "": it is."""

    @property
    def guest(self) -> str:
        return f"{GUEST}-{self.slot}"

    @property
    def worker(self) -> str:
        return f"{WORKER}-{self.slot}"

    def key(self, daemon: str) -> str:
        """What the keys of its guest, or of its worker, are derived from."""
        return f"{daemon} of invitation {self.serial}"


@dataclass(eq=False)
class Guests(CoordinatorPart):
    past: Past
    registration: Registration
    scaling: Scaling
    rate: ScaledRate
    transfers: Transfers
    mirror: LogMirror
    invitations: dict[str, Invitation] = field(default_factory=dict, init=False)
    """By the names that the user has chosen."""
    _changed: set[str] = field(default_factory=set, init=False)
    _line: dict[str, None] = field(default_factory=dict, init=False)
    """The guests that wait for a slot, in order."""
    _began_at: float = field(default=0.0, init=False)

    def begin(self, now: float) -> None:
        """Of this coordinator: the time at which the wall clock was `Past.wall_s`."""
        self._began_at = now

    def _due(self, invitation: Invitation) -> float:
        """When an invitation expires, by this coordinator's clock."""
        return self._began_at + invitation.expires - self.past.wall_s

    def _valid(self) -> Iterator[tuple[str, Invitation]]:
        return ((n, i) for n, i in self.invitations.items() if not i.ended)

    def key_sources(self) -> dict[str, str]:
        """What the keys of the guests that may connect are derived from."""
        return {
            invitation.guest: invitation.key(invitation.guest) for _, invitation in self._valid()
        }

    # ------------------------------------------------------------ requests of the command line

    def invite(self, request: Request, now: float) -> Json:
        """{"name", "serial", "expires": seconds since 1970}. Raises DlctlError."""
        name, serial = str(request.arguments["name"]), str(request.arguments["serial"])
        made = self.invitations.get(name)
        if made is not None and made.serial == serial:
            return self._row(name, made)  # An earlier coordinator has died before it answered.
        self._check_invitable()
        if not NAME.fullmatch(name) or not SERIAL.fullmatch(serial):
            hint = "use letters, digits and dashes"
            raise DlctlError(f'"{name:.80}" cannot be the name of an invitation', hint=hint)
        if made is not None and not made.ended:
            hint = f"dlctl keys revoke {name}, or choose another name"
            raise DlctlError(f"{name} is invited already", hint=hint)
        if len(self.invitations) >= INVITATIONS_MAX:
            raise DlctlError(f"a run has {INVITATIONS_MAX} invitations at most")
        made = Invitation(self._next_slot(), serial, float(request.arguments["expires"]))
        if self._due(made) <= now:
            raise DlctlError("the invitation would have expired before it was written")
        self._put(name, made)
        self.context.event("keys", "", f"{name} is invited, as {made.worker}")
        self.control.admit_members(now)
        return self._row(name, made)

    def _check_invitable(self) -> None:
        job, shape = self.run.job, self.run.algorithm.shape
        if self.run.shutdown is not None:
            raise DlctlError(f"the run is {self.run.state}: nobody can join it")
        if not self.run.keyring.public(""):
            raise DlctlError(
                "the connections of this run have no keys, so nobody can be invited",
                hint='set transport = "tcp" in [network], encryption = "curve", and max in '
                "[workers] to more than count; then stop the run and start it again",
            )
        if shape.links:
            raise DlctlError(
                f"the workers of {job.algorithm.name} connect to each other, and those that join "
                "can only dial out",
                hint="use a method in which workers talk to servers only, such as diloco",
            )
        if self.run.most_workers() <= job.workers.count:
            raise DlctlError(
                f"the run takes {plural(job.workers.count, 'worker')}, which it starts itself",
                hint="set max in [workers] to more than count, stop the run and start it again",
            )

    def _next_slot(self) -> int:
        taken = [daemon.index for daemon in self.members.of_role(WORKER)]
        taken += [invitation.slot for invitation in self.invitations.values()]
        return 1 + max(taken, default=self.run.job.workers.count - 1)

    def revoke(self, request: Request, now: float) -> Json:
        """{"name"}. Raises DlctlError."""
        name = str(request.arguments["name"])
        made = self.invitations.get(name)
        if made is None:
            raise DlctlError(f"nobody is invited as {name:.80}", hint="dlctl keys list")
        if not made.ended:
            self._end(name, "its invitation was revoked", now)
        return self._row(name, self.invitations[name])

    def listed(self, request: Request, now: float) -> Json:
        return {"invitations": [self._row(name, i) for name, i in self.invitations.items()]}

    def _row(self, name: str, made: Invitation) -> Json:
        guest, worker = self.members.get(made.guest), self.members.get(made.worker)
        state = "invited"
        if made.ended:
            state = made.ended
        elif worker is not None and worker.alive:
            state = worker.state
        elif guest is not None and guest.alive:
            state = "in line" if made.guest in self._line else "connected"
        host = guest.host if guest is not None else ""
        return {
            "name": name, "worker": made.worker, "key": made.key(made.guest),
            "expires": made.expires, "state": state, "ended": made.ended, "host": host,
        }  # fmt: skip

    def _put(self, name: str, made: Invitation) -> None:
        self.invitations[name] = made
        self.members.reserved.add(made.slot)
        self._changed.add(name)

    # ------------------------------------------------------------ the end of an invitation

    def _end(self, name: str, why: str, now: float) -> None:
        """End an invitation at once: its peers are sent away, and their pushes refused."""
        made = self.invitations[name]
        self._put(name, replace(made, ended=why))
        self.context.event("keys", made.worker, f"{name}: {why}")
        for daemon in (self.members.get(made.worker), self.members.get(made.guest)):
            if daemon is not None and daemon.peer is not None:
                self.context.send(daemon.peer, m.Dismiss(why))
        guest = self.members.get(made.guest)
        if guest is not None and guest.alive:
            guest.killed_for = why
            self.control.presume_dead(guest, now)
        self.control.admit_members(now)

    def end_all(self, why: str, now: float) -> None:
        for name, _ in list(self._valid()):
            self._end(name, why, now)

    def deadline(self) -> float | None:
        return min((self._due(invitation) for _, invitation in self._valid()), default=None)

    # ------------------------------------------------------------ guests

    def _name_of(self, guest: str) -> str:
        """The invitation of a guest; "" if it has none that is valid."""
        return next((name for name, i in self._valid() if i.guest == guest), "")

    def on_register(self, peer: Peer, message: m.Register, now: float) -> None:
        name = self._name_of(message.name)
        known = self.members.get(message.name)
        is_older = message.incarnation < self.members.newest(message.name)
        if message.run_id != self.run.run_id or not name or is_older or self._is_over():
            why = "another process joins with this invitation" if is_older else "nobody can join"
            self.context.send(peer, m.Dismiss(self.run.reason if self._is_over() else why))
            return
        if known is not None and known.incarnation != message.incarnation:
            known.killed_for = "replaced by a new process"
            self.control.presume_dead(known, now)
            known = None
        if known is None or not known.alive:
            key = self.invitations[name].key(message.name)
            known = self.members.add_invited(message.name, message.name, key)
            known.incarnation = message.incarnation - 1
            known.begin(now)
            known.change_state(daemon_states.RUNNING)
            known.registered, known.host, known.pid = True, message.host, message.pid
            text = f"{name} is connected, from {message.host}"
            self.context.event("guest", known.name, text)
        known.heard(peer, now)
        self.context.send(known.name, m.Welcome(known.name, known.index, 0, b"", {}))

    def _is_over(self) -> bool:
        return self.run.shutdown is not None

    def on_report(self, peer: Peer, report: m.Report, now: float) -> None:
        guest = self._guest(peer, report.name, report.incarnation, now)
        if guest is not None:
            guest.report(report.phase, "", now)
            if guest.state == daemon_states.SLOW:
                guest.change_state(daemon_states.RUNNING)
            self.context.send(guest.name, m.Heard())
        elif report.incarnation < self.members.newest(report.name):
            self.context.send(peer, m.Dismiss(f"{report.name} has been replaced"))
        else:  # It was silent for too long, or this coordinator has no record of it.
            self.context.send(peer, m.RegisterAgain())

    def _guest(self, peer: Peer, name: str, incarnation: int, now: float) -> Daemon | None:
        """The guest that has sent a message. Over a new connection, messages that were sent over
        the old one may be lost.
        """
        guest = self.members.get(name, incarnation)
        if guest is None or not guest.alive:
            return None
        if guest.peer != peer:
            self.context.retries.again(name, now, now)
        guest.heard(peer, now)
        return guest

    def on_want_slot(self, peer: Peer, message: m.WantSlot, now: float) -> None:
        guest = self.members.get(message.name)
        if guest is None or guest.peer != peer or not guest.alive or self._is_over():
            return
        worker = self.members.get(f"{WORKER}-{guest.index}")
        if worker is not None:
            return  # It has a slot: `Spawn` is resent, or the exit of its process on its way.
        self._line.setdefault(guest.name)
        self.advance(now)
        if guest.name in self._line:
            place = 1 + list(self._line).index(guest.name)
            why = self._why_none()
            line = m.InLine(place if self.has_model() else 0, why)
            self.context.send(guest.name, line)

    def has_model(self) -> bool:
        """A worker of the run itself has built the model: a guest cannot decide what that is."""
        return self.registration.layout is not None

    def _why_none(self) -> str:
        if not self.has_model():
            return "the run is starting"
        return f"the run has all of its {plural(self.run.most_workers(), 'worker')}"

    def advance(self, now: float) -> None:
        """Give out free slots, in the order of the line."""
        for _, made in [row for row in self._valid() if self._due(row[1]) <= now]:
            self._end(self._name_of(made.guest), "its invitation has expired", now)
        if not self._line or self._is_over() or not self.has_model():
            return
        for name in list(self._line):
            if self._count() >= self.run.most_workers():
                return
            del self._line[name]
            guest = self.members.get(name)
            if guest is not None and guest.alive:
                self._grant(guest, now)

    def _count(self) -> int:
        """The workers that have a slot."""
        left_out = daemon_states.QUARANTINED
        return sum(worker.state != left_out for worker in self.members.of_role(WORKER))

    def _grant(self, guest: Daemon, now: float) -> None:
        name = self._name_of(guest.name)
        made = self.invitations[name]
        worker = self.members.add_invited(made.worker, guest.name, made.key(made.worker))
        self.context.event("join", worker.name, f"{name} joins, from {guest.host}")
        self.control.start_daemon(worker, now)
        self.control.admit_members(now)
        self.rate.rescale(self._count())

    def on_leaving(self, peer: Peer, message: m.Leaving, now: float) -> None:
        guest = self.members.get(message.name)
        if guest is None or guest.peer != peer or self._is_over():
            return
        worker = self.members.get(f"{WORKER}-{guest.index}")
        if worker is not None and worker.leaving != REMOVAL:
            self.scaling.leave(worker, REMOVAL, now)

    def lose(self, guest: Daemon, now: float) -> None:
        """A guest has ended, or is taken for gone; so is its worker."""
        self._line.pop(guest.name, None)
        worker = self.members.get(f"{WORKER}-{guest.index}")
        if worker is not None and worker.alive:
            worker.killed_for = f"gone with {guest.name}"
            self.control.presume_dead(worker, now)
        elif worker is not None and not self._is_over():
            self.scaling.leave(worker, REMOVAL, now)  # It waits to be started again, by nobody now.
        self.transfers.fail_all(guest.name, "its host has left the run", now)
        self.mirror.lose(guest.name)
        if not self._is_over():
            self.members.remove(guest.name)

    # ------------------------------------------------------------ persisted state

    def changes(self) -> Iterator[Entry]:
        changed, self._changed = self._changed, set()
        for name in sorted(changed):
            made = self.invitations[name]
            yield Entry(INVITATION + name, [made.slot, made.serial, made.expires, made.ended])

    def recall(self, memory: Memory, now: float) -> None:
        for name, row in memory.under(INVITATION):
            self._put(name, Invitation(*row))
        invited = [daemon for daemon in self.members.daemons.values() if daemon.key]
        for daemon in invited:
            if not daemon.alive:
                self.members.remove(daemon.name)
        for daemon in invited:
            if daemon.alive and self.members.get(daemon.agent) is None:
                self.members.remove(daemon.name)
