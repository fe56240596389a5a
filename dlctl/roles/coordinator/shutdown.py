"""The steps in which a run ends. Each has a deadline, and the names of those it waits for.

draining       workers finish their portion, push what is accumulated, wait for the acks
evaluating     a worker evaluates the servers' parameters             (a finished run)
saving         the last checkpoint
finishing      a worker runs the task's `finish`              (a finished run, if it has one)
recording      the database records that the servers' state is not needed (unless the run failed)
shutting down  workers and servers exit, or are killed
collecting     the last lines of the logs of other hosts              (a run that has such)
mirroring      the upload of the last checkpoint                      (a run with a mirror)
leaving        the agents exit
over

Servers remove their persisted state when they exit. A coordinator that replaces this one continues
from the record: unless that says that all is done, it needs the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dlctl.problems import names_in
from dlctl.records.memory import CLOSED, End, Entry, Memory
from dlctl.roles.coordinator.checkpoint_mirror import CheckpointMirror
from dlctl.roles.coordinator.checkpointing import SAVE_S_MAX, Checkpointing
from dlctl.roles.coordinator.evaluation import Evaluations
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.records import EventContext, Owner, PutOnRecord
from dlctl.roles.coordinator.remote_files import LogMirror
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.util.names import ASKING
from dlctl.util.text import KILLED
from dlctl.wire import messages as m

DRAINING, EVALUATING, SAVING, FINISHING, RECORDING, SHUTTING_DOWN, COLLECTING, MIRRORING = (
    "draining", "evaluating", "saving", "finishing", "recording", "shutting down", "collecting",
    "mirroring",
)  # fmt: skip
LEAVING, OVER = "leaving", "over"
SAVES_MAX, SLOW_SAVES_MAX, SAVE_PAUSE_S = 6, 2, 4.0
"""Attempts of the last checkpoint, and the pause after a failed one: a full disk may be cleared."""
SLOW_SAVE_S = 10.0
"""A failed attempt that took longer is repeated once only."""
SAVE_MORE_S = 5.0
"""Time for the manifest of the last checkpoint, once all files are present or given up."""
EVALUATIONS_MAX = 2
"""Workers that are asked for the last evaluation: the evaluation itself may kill a worker."""
RECORD_S = 20.0
"""How long servers and agents wait for the database to be written; after that they keep state."""
EXIT_S = 5.0
"""Time from the request to exit until SIGKILL, and from there until the process is given up."""
STOPPED_BY = {
    "SIGINT": "stopped by Ctrl-C",
    "SIGTERM": "stopped by SIGTERM to dlctl run",
    "SIGHUP": "stopped by SIGHUP: the terminal of dlctl run is gone",
    "timeout": "stopped by dlctl run: it was not ready within --timeout",
}
"""The origins that a stop request may state, and the reasons that the run records for them."""


def _is_to_drain(worker: Daemon) -> bool:
    return worker.alive and worker.asked_for_data and not worker.drained


def _asks(worker: Daemon, head: Daemon) -> bool:
    """Whether it has reported so since that worker ended: an older report may be of a question that
    was answered.
    """
    ended_at = (head.last_exit or {}).get("at", 0.0)
    is_asking = worker.alive and worker.phase == ASKING and worker.reported_at > ended_at
    return is_asking and head.name in names_in(worker.waiting_for)


def stop_reason(origin: object, *, kill: bool = False) -> str:
    """Why a run was stopped. A client chooses from known reasons; other text is ignored."""
    known = STOPPED_BY.get(origin) if isinstance(origin, str) else None
    return known or (KILLED if kill else "stopped by dlctl stop")


@dataclass(eq=False)
class RunShutdown(Owner):
    PERSISTED = frozenset({"state", "reason", "steps"})
    state: str
    """The state that the run ends in: stopped, finished or failed."""
    reason: str
    steps: list[str]
    """The current step and those that follow; initially those of the first four that apply."""
    grace_s: float
    context: EventContext
    members: Membership
    evaluations: Evaluations
    checkpointing: Checkpointing
    save: Callable[[float], None]
    keeps_shards: bool
    """The servers' state survives their exit, unless they are asked to remove it."""
    mirror: LogMirror
    uploads: CheckpointMirror
    mirror_s: float
    """For the upload of the last checkpoint."""
    without_data: frozenset[int] = frozenset()
    """The slots of workers that answer others' questions, and drain once these have."""
    exit_s: float = EXIT_S
    """For daemons to exit on request."""
    was_closed: bool = False
    """An earlier coordinator has asked the servers for the last checkpoint."""
    until: float = field(default=0.0, init=False)
    is_on_record: bool = field(default=False, init=False)
    """The database says that only the exit of the processes is left."""
    _keeps_state: bool = field(default=False, init=False)
    """The database could not say so: the servers' state may be needed."""
    _waits_in_vain: set[str] = field(default_factory=set, init=False)
    """Workers that wait, while they drain, for a worker that has ended."""
    _killed: bool = field(default=False, init=False)
    _is_hurried: bool = field(default=False, init=False)
    """Nothing is waited for that can be done later."""
    _attempts: int = field(default=0, init=False)
    """Last evaluations, or last checkpoints, that this step of the shutdown has started."""

    def __post_init__(self) -> None:
        self._draining = self.members.select(
            ("_state", "drained"), lambda d: d.state == "draining" and not d.drained
        )
        workers = self.members.of_role("worker")
        self._answering = [each for each in workers if each.index in self.without_data]
        self._alive = self.members.select(("_state",), lambda d: d.alive)
        self.steps += [RECORDING, SHUTTING_DOWN, COLLECTING, MIRRORING, LEAVING, OVER]

    def memory(self) -> Iterator[Entry]:
        yield Entry(CLOSED, self.is_closed())
        yield Entry(End.KEY, End(self.state, self.reason, self.grace_s, self.is_shutting_down()))

    def recall(self, memory: Memory, now: float) -> None:
        """It is begun anew (`Persistence.resume`)."""

    @property
    def step(self) -> str:
        return self.steps[0]

    def begin(self, now: float) -> None:
        self._killed = False
        saving_s = SAVE_S_MAX + SAVE_MORE_S
        limits_s = {
            DRAINING: self.grace_s, EVALUATING: EVALUATE_S_MAX, SAVING: saving_s,
            RECORDING: RECORD_S, SHUTTING_DOWN: self.exit_s, MIRRORING: self.mirror_s,
        }  # fmt: skip
        self.until = now + limits_s.get(self.step, EXIT_S)
        if self.is_in_vain():
            return
        if self.step == DRAINING:
            self._drain(now)
        elif self.step == RECORDING:
            self.context.do(PutOnRecord())
        elif self.step == COLLECTING:
            self.mirror.finish(now)
        elif self.step == MIRRORING:
            self.uploads.hurry()
        elif self.step in (SHUTTING_DOWN, LEAVING):
            self._shut_down(now)

    def needs_servers(self) -> bool:
        return self.step in (DRAINING, EVALUATING, SAVING)

    def needs(self, worker: Daemon) -> bool:
        """Whether others may still ask this worker, which is then replaced if it dies."""
        return worker.index in self.without_data and not self.is_closed()

    def _is_replaced(self, worker: Daemon) -> bool:
        """Whether its next process does not work yet, and will."""
        is_there = worker.state == daemon_states.STARTING and not worker.drained
        return self.needs(worker) and (is_there or worker.state == daemon_states.BACKOFF)

    def is_closed(self) -> bool:
        """Whether the servers have begun the last checkpoint: they admit no process that they do
        not know, also when another coordinator begins the shutdown anew.
        """
        return self.was_closed or self.step not in (DRAINING, EVALUATING)

    def is_in_vain(self) -> bool:
        """Whether what this step needs is gone (a shard or, without servers, all replicas), so that
        the step cannot succeed.
        """
        servers = self.members.of_role("server")
        is_gone = any(not s.alive and s.state != "backoff" for s in servers)
        is_empty = not servers and not any(w.alive for w in self.members.of_role("worker"))
        return self.needs_servers() and (is_gone or is_empty)

    def is_shutting_down(self) -> bool:
        """Whether only the exit of the processes is left."""
        return self.step in (RECORDING, SHUTTING_DOWN, COLLECTING, MIRRORING, LEAVING, OVER)

    def is_leaving(self) -> bool:
        """Whether the agents have been asked to exit."""
        return self.step in (LEAVING, OVER)

    def advance(self, now: float) -> None:
        """Advance through the steps as far as possible."""
        self._work(now)
        while self.step != OVER and (not self._waits() or self._is_over(now)):
            self._finish_step()
            self.begin(now)
            self._work(now)

    def _work(self, now: float) -> None:
        self._drain_answering(now)
        self._give_up_questions()
        self._evaluate(now)
        self._save(now)
        if self.step == FINISHING and self.state == "finished":
            self.evaluations.finish(now)
            if self.evaluations.worker:
                self.until = self.evaluations.finish_until()

    def _give_up_questions(self) -> None:
        """Do not wait for those that ask a worker which has ended and is not replaced."""
        if self.step not in (DRAINING, EVALUATING, FINISHING):
            return
        for head in self._answering:
            is_ready = head.alive and head.asked_for_data
            if is_ready or self._is_replaced(head) or head.last_exit is None:
                continue
            why = f"{head.name}, which it asks, is gone ({head.last_exit['text']})"
            for worker in self.members.of_role("worker"):
                if _asks(worker, head):
                    self._give_up_on(worker, why)

    def _give_up_on(self, worker: Daemon, why: str) -> None:
        """Do not wait for this worker, which waits itself, for nothing."""
        waits_in_vain = worker.name in self._waits_in_vain
        if self.step == DRAINING and _is_to_drain(worker) and not waits_in_vain:
            self._waits_in_vain.add(worker.name)
            self.context.event("late", worker.name, f"{self.step}: gave up waiting: {why}")
        elif worker.name != self.evaluations.worker:
            return
        elif self.step == FINISHING:
            saved = "the last checkpoint has the whole model: dlctl checkpoint export"
            self.evaluations.end_finish(f"{why}; {saved}")
        elif self.step == EVALUATING:
            self.evaluations.gone(worker.name)
            self.context.event("late", worker.name, f"{self.step}: gave up waiting: {why}")

    def _evaluate(self, now: float) -> None:
        """Start the last evaluation once an earlier one, of older parameters, has ended. If the
        worker is lost, ask another worker, unless the time is up.
        """
        if self.step != EVALUATING or self.is_in_vain():
            return
        self.evaluations.pass_over()
        is_wanted = not self.evaluations.worker and not self.evaluations.has_last
        if is_wanted and self._attempts < EVALUATIONS_MAX and now < self.until:
            self._attempts += 1
            self.evaluations.begin(now, is_last=True)
            self.until = now + EVALUATE_S_MAX

    def _save(self, now: float) -> None:
        """Start the last checkpoint once an earlier one has ended, which lacks newer pushes."""
        if self.step != SAVING or self.checkpointing.active:
            return
        has_paused = self.checkpointing.since_s(now) >= SAVE_PAUSE_S
        if not self._attempts or (has_paused and self._saves_again()):
            self._attempts += 1
            self.save(now)

    def _saves_again(self) -> bool:
        most = SAVES_MAX if self.checkpointing.last_s < SLOW_SAVE_S else SLOW_SAVES_MAX
        return bool(self.checkpointing.last_error) and self._attempts < most

    def hurry(self, now: float) -> None:
        """Kill what is left (`stop --kill`)."""
        self._is_hurried = True
        while self.needs_servers() or self.step in (FINISHING, RECORDING):
            self._finish_step(is_killed=True)
        self.begin(now)
        self.until = now

    def pending(self) -> list[str]:
        """What the current step waits for."""
        return list(self._pending())

    def _pending(self) -> Iterable[str]:
        if self.is_in_vain():
            return ()
        if self.step == DRAINING:
            asked = {daemon.name for daemon in self._draining}
            untold = (e for e in self._answering if _is_to_drain(e) or self._is_replaced(e))
            waits_for = [*self._draining, *(each for each in untold if each.name not in asked)]
            waits_for = [each for each in waits_for if each.name not in self._waits_in_vain]
            return (daemon.name for daemon in waits_for if not daemon.out_of_touch)
        if self.step in (EVALUATING, FINISHING):
            return filter(None, [self.evaluations.worker])
        if self.step == SAVING:
            return self._unsaved()
        if self.step == RECORDING:
            return self._unrecorded()
        if self.step == COLLECTING:
            return self.mirror.pending()
        if self.step == MIRRORING:
            return [] if self._is_hurried else self.uploads.waits_for()
        leavers = filter(self._leaves, self._alive)
        return (daemon.name for daemon in leavers if self._is_observable(daemon))

    def _waits(self) -> bool:
        return any(True for _ in self._pending())

    def _unsaved(self) -> list[str]:
        if not self._attempts or self.checkpointing.active:
            return self.checkpointing.waits_for()
        error = self.checkpointing.last_error
        return [f"another attempt: {error}"] if self._saves_again() else []

    def _unrecorded(self) -> list[str]:
        """A failed run needs no record: its recovery uses the servers' state in any case."""
        if self.is_on_record or self.state == "failed":
            return []
        error = self.context.unwritten
        return [f"the run's database{f', which cannot be written: {error}' if error else ''}"]

    def _is_observable(self, daemon: Daemon) -> bool:
        """Whether an agent is left that can report its exit; else the driver handles it."""
        agent = self.members.agent_of(daemon)
        is_there = agent.alive or agent.retry_at is not None
        # An agent on an unreachable host may reconnect in time to get the request.
        return is_there and not (daemon.out_of_touch and daemon.role != "agent")

    def _leaves(self, daemon: Daemon) -> bool:
        """Whether a daemon is asked to exit in this step."""
        return (daemon.role in ("agent", "guest")) == (self.step == LEAVING)

    def _leavers(self) -> list[Daemon]:
        return [daemon for daemon in self.members.daemons.values() if self._leaves(daemon)]

    def drain_late(self, worker: Daemon, now: float) -> None:
        """Drain a worker that became ready, or came back, only now. There is no data for it any
        more, and the others may wait for it at a barrier.
        """
        is_notified = worker.drained or ("drain", worker.name) in self.context.retries
        if self.needs_servers() and not is_notified and worker.index not in self.without_data:
            self.context.drain(worker, self.reason, now)

    def _drain(self, now: float) -> None:
        for worker in self.members.of_role("worker"):
            if worker.alive and worker.asked_for_data and worker.index not in self.without_data:
                self.context.drain(worker, self.reason, now)

    def _drain_answering(self, now: float) -> None:
        """Drain those that the others have asked until now, once these are drained."""
        if not self._answering or self.step not in (DRAINING, EVALUATING):
            return
        asking = (each for each in self._draining if each.index not in self.without_data)
        if any(not daemon.out_of_touch for daemon in asking):
            return
        for worker in self._answering:
            if _is_to_drain(worker) and ("drain", worker.name) not in self.context.retries:
                self.context.drain(worker, self.reason, now)

    def _shut_down(self, now: float) -> None:
        """Request their exit; resent until the exit is known (`FailureDetector.on_exit`)."""
        for daemon in self._leavers():
            if not daemon.alive and daemon.state in daemon_states.UNSTARTED:
                is_lost = daemon.out_of_touch
                daemon.change_state(daemon_states.FAILED if is_lost else daemon_states.STOPPED)
                daemon.retry_at = None
            elif daemon.alive and not daemon.registered:
                self.context.kill(daemon, 15, now)
            elif daemon.alive:
                # A failed run may be recovered; one that ended in order has its checkpoint.
                keep_state = self.state == "failed" or self._keeps_state
                shutdown = m.Shutdown(self.reason, keep_state, self.state)
                self.context.ask(("shutdown", daemon.name), daemon.name, shutdown, now)
            elif daemon.state == daemon_states.QUARANTINED and self.state == "failed":
                daemon.change_state(daemon_states.FAILED)  # A recovery starts it like the others.

    def _is_over(self, now: float) -> bool:
        """Whether the step's time is over; daemons that did not exit are killed first."""
        if self.step == SAVING and self.checkpointing.active:
            # A large file may take long; it is given up only when its transfer stalls.
            self.until = max(self.until, (self.checkpointing.deadline() or 0.0) + SAVE_MORE_S)
        elif self.step == DRAINING and self._waits_for_evaluation():
            self.until = max(self.until, now + self.grace_s)
        if now < self.until:
            return False
        if self.step in (SHUTTING_DOWN, LEAVING) and not self._killed:
            self._killed = True
            self.until = now + EXIT_S
            for daemon in self._leavers():
                if daemon.alive:
                    self.context.kill(daemon, 9, now)
            return False
        if self.step == FINISHING:
            return True
        late = ", ".join(self.pending())
        self.context.event("late", "", f"{self.step}: gave up waiting for {late}")
        self._keeps_state |= self.step == RECORDING
        if self.step == MIRRORING:
            self.uploads.give_up()
        return True

    def _waits_for_evaluation(self) -> bool:
        """A worker that evaluates pushes nothing, and must end that before the last evaluation
        anyway: only then its time to drain begins. Only the worker that was asked to counts: an
        evaluation has a deadline.
        """
        worker = self.members.get(self.evaluations.worker)
        return EVALUATING in self.steps and worker is not None and worker.evaluates

    def _finish_step(self, *, is_killed: bool = False) -> None:
        if self.step == EVALUATING:
            self.evaluations.gone(self.evaluations.worker)
        elif self.step == FINISHING:
            self.evaluations.end_finish()
        elif self.step == SAVING:
            self._check_last_checkpoint(is_killed)
        self.steps = self.steps[1:]
        self._attempts = 0

    def _check_last_checkpoint(self, is_killed: bool) -> None:
        """If the last checkpoint failed, keep the shards, which alone have the newest state."""
        error = self.checkpointing.last_error if self._attempts else ""
        if not is_killed and (not self._attempts or self.checkpointing.active):
            error = f"gave up waiting for {', '.join(self.checkpointing.waits_for())}"
        if error and (unwritten := self.context.unwritten):
            error += f"; the run's database cannot be written: {unwritten}"
        if error and self.keeps_shards and self.state != "failed":
            self.reason = f"{self.reason}, but its last checkpoint failed: {error}"
            self.state = "failed"
