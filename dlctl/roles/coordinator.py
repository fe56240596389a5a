"""The coordinator role: the control plane of one run.

It has no parameters and no gradients; if it is away, workers and servers go on with what they have. It
knows who is there (`membership`), hands out data (`work`), changes settings (`changes`), has the state
saved (`checkpointing`) and brings the run to an end in order (`ending`). This file is how these parts
meet: a daemon's way from registering to work, its death, and the requests of the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlctl import messages as m
from dlctl.algorithms.base import Algorithm
from dlctl.config import JobFile
from dlctl.errors import DlctlError, UsageError
from dlctl.flat import Layout, shard_bounds
from dlctl.machine import (
    Configure,
    DeadlineReached,
    Effect,
    Event,
    Exit,
    Peer,
    Received,
    Send,
    Started,
    StopRequested,
)
from dlctl.messages import Json
from dlctl.roles import ending
from dlctl.roles.changes import Changes
from dlctl.roles.checkpointing import Checkpointing
from dlctl.roles.desk import Desk
from dlctl.roles.effects import ProcessEnded
from dlctl.roles.ending import Ending
from dlctl.roles.journal import (
    AddEvent,
    AddMetric,
    CheckpointBegun,
    CheckpointEnded,
    IssueTerm,
    KillAgent,
    LaunchAgent,
    Snapshot,
)
from dlctl.roles.membership import Daemon, Membership
from dlctl.roles.token import sign
from dlctl.roles.work import Work
from dlctl.settings import parse
from dlctl.units import parse_rate

SNAPSHOT_S = 0.5
EVALUATE_S_MAX = 600.0
SLOW_S = 5.0
"""Without a word from a daemon after which `status` calls it slow."""


@dataclass(frozen=True, slots=True)
class Past:
    """What earlier executions of this run have left on record."""

    terms: dict[str, int] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    checkpoints: int = 0
    """Number of the newest checkpoint that there has been."""
    restore: str = ""
    """Directory of the checkpoint to go on from, or ""."""
    manifest: Json = field(default_factory=dict)


class Coordinator:
    def __init__(
        self, run_id: str, job: JobFile, key: bytes, algorithm: Algorithm, past: Past
    ) -> None:
        self.run_id = run_id
        self.job = job
        self.key = key
        self.past = past
        self.desk = Desk(job.timeouts.resend_s)
        self.members = Membership(job.servers.count, job.workers.count, past.incarnations)
        side = algorithm.coordinator(algorithm.Options(**job.algorithm.options))
        self.work = Work(self.desk, self.members, job, side)
        self.changes = Changes(self.desk, self.members)
        self.checkpointing = Checkpointing(
            self.desk, self.members, job.checkpoints.keep, job.checkpoints.every_s, past.checkpoints
        )
        self.state = "pending"
        self.reason = ""
        self.ending: Ending | None = None
        self.evaluation: Json | None = None
        self._terms = dict(past.terms)
        self._layout: bytes | None = None
        self._evaluating: tuple[int, str, float] | None = None
        """(number, worker, give up at)."""
        self._evaluations = 0
        self._started_at = 0.0
        self._snapshot_at = 0.0
        self._stop_clients: dict[int, Peer] = {}
        self._answers: dict[int, m.Reply] = {}
        self._clients: dict[int, Peer] = {}
        self._rates: tuple[float, int, int] = (0.0, 0, 0)
        self._per_s: tuple[float, float] = (0.0, 0.0)
        if past.manifest:
            self.work.restore(past.manifest.get("data", {}))
            self.evaluation = past.manifest.get("evaluation")

    # ------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(peer, message):
                self._on_message(peer, message, now)
            case DeadlineReached():
                self._on_deadline(now)
            case ProcessEnded(name, incarnation, status, last_lines):
                self._on_exit(name, incarnation, status, last_lines, now)
            case CheckpointBegun():
                self.checkpointing.on_begun(event, now)
            case CheckpointEnded():
                self.checkpointing.on_ended(event, now)
            case Started():
                self._start(now)
            case StopRequested(reason):
                self._end("stopped", reason, now)
        self._advance(now)
        return [e for effect in self.desk.clear() for e in self._routed(effect)]

    def _routed(self, effect: Effect) -> list[Effect]:
        """Daemons are addressed by name here; a message goes to the connection of the newest process."""
        if not isinstance(effect, Send) or isinstance(effect.peer, bytes):
            return [effect]
        daemon = self.members.daemons.get(effect.peer)
        if daemon is None or daemon.peer is None:
            return []
        return [Send(daemon.peer, effect.message)]

    def deadline(self) -> float | None:
        times = [
            self.desk.outstanding.deadline(), self.changes.deadline(), self._snapshot_at,
            self.checkpointing.deadline(), self.work.deadline(),
        ]  # fmt: skip
        times += [d.retry_at for d in self.members.daemons.values()]
        times += [self.ending.until] if self.ending else []
        return min((t for t in times if t is not None), default=None)

    def _on_message(self, peer: Peer, message: m.Message, now: float) -> None:
        handler = self._HANDLERS.get(type(message))
        if handler is None:
            self.desk.note("warning", f"a coordinator has no use for {type(message).__name__}")
        else:
            handler(self, peer, message, now)

    def _on_deadline(self, now: float) -> None:
        self.desk.do(*self.desk.outstanding.due(now))
        self.changes.on_deadline(now)
        self.checkpointing.on_deadline(now)
        for daemon in self.members.daemons.values():
            if daemon.retry_at is not None and daemon.retry_at <= now and self.ending is None:
                self._spawn(daemon, now)
            self._watch(daemon, now)

    def _advance(self, now: float) -> None:
        """What follows from the state as it is now."""
        if self.ending is not None:
            self._advance_ending(now)
        else:
            self._advance_run(now)
        if self._snapshot_at <= now:
            self._snapshot(now)

    # ------------------------------------------------------------ starting

    def _start(self, now: float) -> None:
        self._started_at = now
        self._change_state("starting", "", now)
        for agent in self.members.of("agent"):
            agent.begin(now)
            self.desk.do(LaunchAgent(agent.name, agent.incarnation))

    def _spawn(self, daemon: Daemon, now: float) -> None:
        daemon.begin(now)
        text = f"{daemon.name} starts, incarnation {daemon.incarnation}"
        self._event("start", daemon.name, text)
        message = m.Spawn(daemon.name, daemon.role, daemon.incarnation)
        self.desk.ask(("spawn", daemon.name), "agent-0", message, now)

    def _on_register(self, peer: Peer, message: m.Register, now: float) -> None:
        daemon = self.members.get(message.name, message.incarnation)
        if message.run_id != self.run_id or daemon is None:
            self.desk.send(peer, m.Dismiss(f"{message.name} is not (or no longer) of this run"))
            return
        daemon.heard(peer, now)
        daemon.host, daemon.pid = message.host, message.pid
        first = daemon.state == "starting" and daemon.phase == "starting"
        if first:
            daemon.phase = "registered"
            self._issue_term(daemon)
        token = b""
        if daemon.role == "worker":
            token = sign(self.key, self.run_id, daemon.index, daemon.term)
        settings = self._limits(daemon) | daemon.settings
        welcome = m.Welcome(daemon.name, daemon.index, daemon.term, token, settings)
        self.desk.send(daemon.name, welcome)
        if daemon.role == "agent" and first:
            daemon.state = "running"
            for other in self.members.daemons.values():
                if other.role != "agent" and self.ending is None:
                    self._spawn(other, now)
        elif daemon.role == "server":
            self._assign_all(now)

    def _issue_term(self, daemon: Daemon) -> None:
        if daemon.role != "agent":
            daemon.term = self._terms.get(daemon.name, 0) + 1
            self._terms[daemon.name] = daemon.term
            self.desk.do(IssueTerm(daemon.name, daemon.term))

    def _limits(self, daemon: Daemon) -> Json:
        if daemon.role != "worker":
            return {}
        limits = self.job.limits
        return {"push": parse_rate(limits.push), "fetch": parse_rate(limits.fetch)}

    def _on_spawned(self, peer: Peer, message: m.Spawned, now: float) -> None:
        daemon = self.members.get(message.name, message.incarnation)
        self.desk.outstanding.done(("spawn", message.name), now)
        if daemon is not None and message.pid:
            daemon.pid = message.pid

    def _on_model_ready(self, peer: Peer, message: m.ModelReady, now: float) -> None:
        daemon = self.members.get(message.name)
        if daemon is None or daemon.peer != peer:
            return
        if self._layout is None:
            try:
                self._accept_model(message)
            except DlctlError as error:
                self._end("failed", f"{error.message}; {error.hint}", now)
                return
        if message.layout != self._layout:
            self._end("failed", f"{message.name} built another model than the first worker", now)
            return
        daemon.model_ready = True
        self._assign_all(now)
        self._introduce(now)

    def _accept_model(self, message: m.ModelReady) -> None:
        """The first model fixes the layout. Raises DlctlError if it is not the checkpoint's."""
        manifest = self.past.manifest
        if manifest and Layout.from_bytes(message.layout) != Layout.from_rows(manifest["layout"]):
            raise DlctlError(
                "the task builds another model than the one in the checkpoint",
                hint="start with --fresh to begin a new run",
            )
        self.work.open_dataset(message.samples)
        self._layout = message.layout

    def _assign_all(self, now: float) -> None:
        """Tell every server what it owns, as soon as the size of the model is known."""
        if self._layout is None:
            return
        bounds = shard_bounds(Layout.from_bytes(self._layout).size(), self.job.servers.count)
        for server in self.members.of("server"):
            if server.term and not server.address and ("assign", server.name) not in (
                self.desk.outstanding
            ):
                lo, hi = bounds[server.index]
                assign = m.Assign(lo, hi, self._layout, self.past.restore)
                self.desk.ask(("assign", server.name), server.name, assign, now)

    def _on_serving(self, peer: Peer, message: m.Serving, now: float) -> None:
        server = self.members.get(message.name)
        if server is None or server.peer != peer:
            return
        self.desk.outstanding.done(("assign", message.name), now)
        server.address, server.state = message.address, "running"
        self._introduce(now)

    def _introduce(self, now: float) -> None:
        """Tell the workers where the servers are, once all of these serve."""
        servers = self.members.of("server")
        if not all(server.address for server in servers):
            return
        addresses = tuple(server.address for server in servers)
        for worker in self.members.of("worker"):
            if worker.model_ready and not worker.asked_for_data:
                fresh = worker.term == self.past.terms.get(worker.name, 0) + 1
                restore = self.past.restore if fresh else ""
                initialise = worker.index == 0 and not self.past.restore
                self.desk.send(worker.name, m.Topology(addresses, initialise, restore))

    # ------------------------------------------------------------ at work

    def _on_lease_request(self, peer: Peer, message: m.LeaseRequest, now: float) -> None:
        worker = self.members.worker(message.slot, message.epoch)
        if worker is None:
            self.desk.send(peer, m.Dismiss(f"worker-{message.slot} has been replaced"))
            return
        worker.heard(peer, now)
        if not worker.asked_for_data:
            worker.state = "running"
            worker.asked_for_data = True
            self._tell_members()
        self.work.on_request(message, now)

    def _advance_run(self, now: float) -> None:
        if self.state == "starting":
            if all(w.asked_for_data for w in self.members.of("worker")):
                self._change_state("running", "", now)
                self._tell_members()
                self.work.release(now)
                self.checkpointing.schedule(now)
            elif now - self._started_at > self.job.timeouts.ready_s:
                self._end("failed", f"not ready in time; waiting for {self._unready()}", now)
        elif self.state in ("running", "degraded"):
            self._update_health(now)
            if reason := self.work.enough(now):
                self._end("finished", reason, now)
            elif self.checkpointing.is_due(now):
                self._begin_checkpoint(now, None)
            elif self.work.evaluation_due():
                self._begin_evaluation(now)

    def _unready(self) -> str:
        late = [d for d in self.members.daemons.values() if d.state == "starting"]
        return ", ".join(f"{d.name} ({d.phase})" for d in late)

    def _update_health(self, now: float) -> None:
        well = all(d.state == "running" for d in self.members.daemons.values())
        if well != (self.state == "running"):
            troubled = [d.name for d in self.members.daemons.values() if d.state != "running"]
            self._change_state("running" if well else "degraded", ", ".join(troubled), now)

    def _tell_members(self, server: Daemon | None = None) -> None:
        """Barriers count the workers that take part. Sent again with every server's report."""
        if self.work.released_at is None and self.state != "running":
            return
        for told in [server] if server is not None else self.members.of("server"):
            self.desk.send(told.name, m.Members(self.members.live_slots()))

    def _on_portion_done(self, peer: Peer, done: m.PortionDone, now: float) -> None:
        worker = self.members.worker(done.slot, done.epoch)
        if worker is None:
            self.desk.send(peer, m.Dismiss(f"worker-{done.slot} has been replaced"))
            return
        self.work.on_portion_done(done, now)
        self.desk.send(worker.name, m.PortionNoted(done.data_epoch, done.portion))

    def _on_report(self, peer: Peer, report: m.Report, now: float) -> None:
        daemon = self.members.get(report.name, report.incarnation)
        if daemon is None:
            self.desk.send(peer, m.Dismiss(f"{report.name} has been replaced"))
            return
        daemon.heard(peer, now)
        if daemon.state == "slow":
            daemon.state = "running"
        daemon.report(report.phase, report.waiting_for, now)
        daemon.metrics = report.metrics
        if daemon.role == "agent":
            self.desk.send(daemon.name, m.Heard())
        elif daemon.role == "server":
            self._tell_members(daemon)
        if daemon.role != "agent" and self.state in ("running", "degraded"):
            step = report.metrics.get("step") or report.metrics.get("version") or 0
            self.desk.do(AddMetric(report.name, step, report.metrics))

    # ------------------------------------------------------------ evaluations

    def _begin_evaluation(self, now: float) -> bool:
        able = [d for d in self.members.of("worker") if d.alive and d.asked_for_data]
        if self._evaluating is not None or not able:
            return self._evaluating is not None
        self._evaluations += 1
        name = able[0].name
        self._evaluating = (self._evaluations, name, now + EVALUATE_S_MAX)
        self.desk.ask(("evaluate", name), name, m.Evaluate(self._evaluations), now)
        return True

    def _on_evaluated(self, peer: Peer, message: m.Evaluated, now: float) -> None:
        self.desk.outstanding.done(("evaluate", message.name), now)
        if self._evaluating is None or self._evaluating[0] != message.evaluation:
            return
        self._evaluating = None
        if message.metrics:
            self.evaluation = message.metrics | {"step": self.work.steps}
            shown = ", ".join(f"{k} {v:.4g}" for k, v in message.metrics.items())
            self._event("evaluation", message.name, f"step {self.work.steps}: {shown}")
            target = self.work.target
            if self.ending is None and target and target.is_reached(message.metrics):
                self._end("finished", f"the target {target} is reached", now)

    # ------------------------------------------------------------ checkpoints

    def _begin_checkpoint(self, now: float, listener: Callable[[Json], None] | None) -> None:
        assert self._layout is not None
        layout = Layout.from_bytes(self._layout)
        manifest = {
            "run_id": self.run_id,
            "job": self.job.job.name,
            "samples": self.work.samples,
            "layout": layout.to_rows(),
            "size": layout.size(),
            "algorithm": self.job.algorithm.name,
            "optimizer": self.job.optimizer.name,
            "data": self.work.to_json(),
            "evaluation": self.evaluation,
        }
        self.checkpointing.begin(self.work.steps, manifest, now, listener)

    # ------------------------------------------------------------ deaths

    def _watch(self, daemon: Daemon, now: float) -> None:
        """A daemon that has not said a word: first slow, then lost."""
        silent_s = now - daemon.heard_at
        if daemon.state == "running" and silent_s > SLOW_S:
            daemon.state = "slow"
        limit_s = self.job.timeouts.silent_s
        if not daemon.alive or daemon.peer is None or silent_s <= limit_s:
            return
        daemon.heard_at = now  # Once per limit.
        self._event("silent", daemon.name, f"no word from {daemon.name} for {limit_s:.0f} s")
        if daemon.role == "agent":
            self.desk.do(KillAgent(daemon.name))
        else:
            self.desk.send("agent-0", m.Kill(daemon.name, daemon.incarnation, 9))

    def _on_process_exited(self, peer: Peer, message: m.ProcessExited, now: float) -> None:
        self.desk.send(peer, m.ExitNoted(message.name, message.incarnation))
        self._on_exit(message.name, message.incarnation, message.status, message.last_lines, now)

    def _on_exit(
        self, name: str, incarnation: int, status: int, last_lines: tuple[str, ...], now: float
    ) -> None:
        daemon = self.members.get(name, incarnation)
        if daemon is None or not daemon.alive:
            return
        daemon.ended(status, last_lines, now)
        for key in ("spawn", "assign", "evaluate"):
            self.desk.outstanding.drop((key, name))
        assert daemon.last_exit is not None
        text = f"{name} ended: {daemon.last_exit['text']}"
        self._event("exit", name, text, last_lines=list(last_lines[-5:]))
        self.checkpointing.on_gone(name, now)
        if self._evaluating is not None and self._evaluating[1] == name:
            self._evaluating = None
        if daemon.role == "worker":
            self._lose_worker(daemon, now)
        elif self.ending is None:
            what = "its shard is lost" if daemon.role == "server" else "its daemons are orphans"
            self._end("failed", f"{text}; {what}", now)

    def _lose_worker(self, worker: Daemon, now: float) -> None:
        """The others go on: its portions are leased again, barriers do not count it any more."""
        portions = self.work.gone(worker.index, now)
        self._tell_members()
        if self.ending is not None:
            return
        if worker.error:
            self._end("failed", f"{worker.name}: {worker.error}", now)
        elif worker.restarts >= self.job.workers.restarts_max:
            self._end("failed", f"{worker.name} died {worker.restarts + 1} times", now)
        else:
            worker.back_off(now)
            self._event("lost", worker.name, f"{portions} portions of {worker.name} go back")

    def _on_failed(self, peer: Peer, message: m.Failed, now: float) -> None:
        daemon = self.members.get(message.name)
        if daemon is None or daemon.peer != peer:
            return
        daemon.error = message.error
        self._event("error", message.name, message.error, detail=message.detail)
        if message.fatal:
            self._end("failed", f"{message.name}: {message.error}", now)

    # ------------------------------------------------------------ the end

    def _end(
        self, state: str, reason: str, now: float, *, save: bool = True, grace_s: float | None = None
    ) -> None:
        if self.ending is not None:
            return
        whole = all(s.state == "running" for s in self.members.of("server"))
        worked = self.work.released_at is not None and whole
        steps = ending.plan(
            state,
            drain=worked,
            evaluate=worked and state == "finished",
            save=worked and save and self.work.steps > 0,
        )
        grace = self.job.timeouts.grace_s if grace_s is None else grace_s
        self.ending = Ending(state, reason, steps, grace)
        self.work.stopped = True
        self._change_state("stopping", reason, now)
        self._begin_step(now)

    def _begin_step(self, now: float) -> None:
        assert self.ending is not None
        step = self.ending.step
        self._tell_stop_clients(False)
        if step == ending.DRAINING:
            self.ending.until = now + self.ending.grace_s
            self._drain(now)
        elif step == ending.EVALUATING:
            self.ending.until = now + EVALUATE_S_MAX
            self._evaluating = None
            self._begin_evaluation(now)
        elif step == ending.SAVING:
            self.ending.until = now + 2 * EVALUATE_S_MAX
            self._begin_checkpoint(now, lambda row: None)
        elif step == ending.SHUTTING_DOWN:
            self._shut_down(("worker", "server"), now)
        elif step == ending.AGENTS:
            self._shut_down(("agent",), now)

    def _drain(self, now: float) -> None:
        for worker in self.members.of("worker"):
            if worker.alive and worker.asked_for_data:
                worker.state = "draining"
                drain = m.Drain(self.reason)
                self.desk.ask(("drain", worker.name), worker.name, drain, now)
        self.work.grant(now)

    def _on_drained(self, peer: Peer, message: m.Drained, now: float) -> None:
        self.desk.outstanding.done(("drain", message.name), now)
        worker = self.members.get(message.name)
        if worker is not None and not worker.drained:
            worker.drained = True
            self._tell_members()

    def _shut_down(self, roles: tuple[str, ...], now: float) -> None:
        assert self.ending is not None
        self.ending.until, self.ending.killed = now + ending.SHUTDOWN_S, False
        for role in roles:
            for daemon in self.members.of(role):
                self.desk.send(daemon.name, m.Shutdown(self.reason))
                if daemon.state in ("backoff", "pending"):
                    daemon.state = "stopped"
                elif daemon.peer is None and daemon.alive and daemon.role != "agent":
                    self.desk.send("agent-0", m.Kill(daemon.name, daemon.incarnation, 15))

    def _advance_ending(self, now: float) -> None:
        """Go from step to step as soon as nobody is being waited for, or the step's time is over."""
        assert self.ending is not None
        while self.ending.step != ending.OVER and (not self._pending() or self._step_is_over(now)):
            for worker in self.members.of("worker"):
                self.desk.outstanding.drop(("drain", worker.name))
            self.ending.next()
            self._begin_step(now)
        if self.ending.step == ending.OVER:
            self._over(now)

    def _pending(self) -> list[str]:
        """Whom the present step of the ending waits for."""
        assert self.ending is not None
        step, daemons = self.ending.step, self.members.daemons.values()
        if step == ending.DRAINING:
            return [d.name for d in daemons if d.state == "draining" and not d.drained]
        if step == ending.EVALUATING:
            return [self._evaluating[1]] if self._evaluating else []
        if step == ending.SAVING:
            waiting = self.checkpointing.waiting() or "the manifest"
            return [waiting] if self.checkpointing.active else []
        agents = step == ending.AGENTS
        return [d.name for d in daemons if d.alive and (d.role == "agent") == agents]

    def _step_is_over(self, now: float) -> bool:
        assert self.ending is not None
        if now < self.ending.until:
            return False
        late = ", ".join(self._pending())
        self._event("late", "", f"{self.ending.step}: gave up waiting for {late}")
        if self.ending.step not in (ending.SHUTTING_DOWN, ending.AGENTS) or self.ending.killed:
            return True
        self.ending.until, self.ending.killed = now + ending.SHUTDOWN_S, True
        for name in self._pending():
            daemon = self.members.daemons[name]
            if daemon.role == "agent":
                self.desk.do(KillAgent(name))
            else:
                self.desk.send("agent-0", m.Kill(name, daemon.incarnation, 9))
        return False

    def _over(self, now: float) -> None:
        assert self.ending is not None
        final = self.ending
        self._change_state(final.state, final.reason, now)
        self._snapshot(now)
        self._tell_stop_clients(True)
        self.desk.do(Exit(1 if final.state == "failed" else 0, final.reason))

    # ------------------------------------------------------------ the command line

    def _on_client(self, peer: Peer, request: m.Request, now: float) -> None:
        self._clients[request.request] = peer
        if request.request in self._answers:
            self.desk.send(peer, self._answers[request.request])
            return
        self._answer(request.request, False, "", {"phase": "received"})
        try:
            self._VERBS[request.verb](self, request, now)
        except KeyError:
            self._answer(request.request, True, f'unknown request "{request.verb:.40}"', {})
        except (UsageError, ValueError, TypeError) as error:
            self._answer(request.request, True, str(error), {})

    def _answer(self, request: int, done: bool, error: str, result: Json) -> None:
        reply = m.Reply(request, done, error, result)
        self._answers[request] = reply
        self.desk.send(self._clients[request], reply)

    def _verb_stop(self, request: m.Request, now: float) -> None:
        arguments = request.arguments
        self._stop_clients[request.request] = self._clients[request.request]
        kill, save = bool(arguments.get("kill")), arguments.get("checkpoint", True) is True
        grace_s = float(arguments.get("grace_s", self.job.timeouts.grace_s))
        if self.ending is None:
            self._end("stopped", "stopped by dlctl stop", now, save=save and not kill, grace_s=grace_s)
        if kill and self.ending is not None:
            while self.ending.step not in (ending.SHUTTING_DOWN, ending.AGENTS, ending.OVER):
                self.ending.next()
            self._begin_step(now)
            self.ending.until = now

    def _tell_stop_clients(self, done: bool) -> None:
        assert self.ending is not None
        result = {"phase": self.ending.step, "waiting": [] if done else self._pending()}
        for request in self._stop_clients:
            self._answer(request, done, "", result | {"state": self.state})

    def _verb_set(self, request: m.Request, now: float) -> None:
        names, texts = request.arguments["names"], request.arguments["settings"]
        values = {key: parse(key, text) for key, text in texts.items()}
        unknown = [name for name in names if name not in self.members.daemons]
        if unknown or not values:
            raise UsageError(f"no such daemon: {', '.join(unknown)}" if unknown else "no settings")
        shown = ", ".join(f"{key}={text}" for key, text in texts.items())
        self._event("set", ", ".join(names), f"set {shown}")
        if "coordinator" in names and "log_level" in values:
            self.desk.do(Configure("log_level", values["log_level"]))
        number = request.request
        self.changes.begin(names, values, now, lambda rows: self._answer(number, True, "", rows))

    def _verb_checkpoint(self, request: m.Request, now: float) -> None:
        number = request.request
        if self.state not in ("running", "degraded"):
            raise UsageError(f"the run is {self.state}: there is nothing to save now")
        self._begin_checkpoint(now, lambda row: self._answer(number, True, row["error"], row))

    # ------------------------------------------------------------ what status shows

    def _change_state(self, state: str, reason: str, now: float) -> None:
        self.state, self.reason = state, reason
        self._event("state", "", state + (f": {reason}" if reason else ""))
        self._snapshot_at = now

    def _event(self, kind: str, daemon: str, text: str, **data: Any) -> None:
        level = "warning" if kind in ("exit", "error", "lost", "silent", "late") else "info"
        self.desk.note(level, text)
        self.desk.do(AddEvent(kind, daemon, text, data))

    def waiting(self) -> str:
        """Whom the run waits for now, and for what; "" if for nobody."""
        if self.ending is not None:
            return f"{self.ending.step}: {', '.join(self._pending())}" if self._pending() else ""
        if self.state == "starting":
            return self._unready()
        return self.work.held_back()

    def _snapshot(self, now: float) -> None:
        self._snapshot_at = now + SNAPSHOT_S
        self._measure(now)
        checkpoint = self.checkpointing
        run = {
            "state": self.state,
            "reason": self.reason,
            "step": self.work.steps,
            "samples": self.work.samples,
            "steps_per_s": round(self._per_s[0], 2),
            "samples_per_s": round(self._per_s[1], 2),
            "data_epoch": round(self.work.epochs_done(), 4),
            "progress": self.work.progress(),
            "loss": self.work.loss,
            "evaluation": self.evaluation,
            "ready_at": self.work.released_at,
            "updated_at": now,
            "ended_at": now if self.ending and self.ending.step == ending.OVER else None,
            "waiting": self.waiting(),
            "checkpoint": checkpoint.newest,
            "checkpoint_error": checkpoint.last_error,
            "settings": {d.name: d.settings for d in self.members.daemons.values() if d.settings},
        }
        if checkpoint.newest is None:
            del run["checkpoint"]
        rows = tuple(d.to_json() for d in self.members.daemons.values())
        self.desk.do(Snapshot(run, rows))

    def _measure(self, now: float) -> None:
        """Rates over the last seconds, from what is done."""
        at, steps, samples = self._rates
        if now - at >= 2.0:
            if at:
                elapsed_s = now - at
                self._per_s = (
                    (self.work.steps - steps) / elapsed_s,
                    (self.work.samples - samples) / elapsed_s,
                )
            self._rates = (now, self.work.steps, self.work.samples)

    _VERBS: dict[str, Callable[[Any, m.Request, float], None]] = {
        "stop": _verb_stop,
        "set": _verb_set,
        "checkpoint": _verb_checkpoint,
    }
    _HANDLERS: dict[type, Callable[[Any, Peer, Any, float], None]] = {
        m.Register: _on_register,
        m.Spawned: _on_spawned,
        m.ModelReady: _on_model_ready,
        m.Serving: _on_serving,
        m.LeaseRequest: _on_lease_request,
        m.PortionDone: _on_portion_done,
        m.Report: _on_report,
        m.Evaluated: _on_evaluated,
        m.Changed: lambda self, peer, msg, now: self.changes.on_changed(msg, now),
        m.Saved: lambda self, peer, msg, now: self.checkpointing.on_saved(msg, now),
        m.VectorResult: lambda self, peer, msg, now: self._on_vector_result(msg, now),
        m.ProcessExited: _on_process_exited,
        m.Failed: _on_failed,
        m.Drained: _on_drained,
        m.Request: _on_client,
    }

    def _on_vector_result(self, message: m.VectorResult, now: float) -> None:
        if self.work.driving is not None:
            self.work.driving.on_result(message, now)
            self.work.grant(now)
