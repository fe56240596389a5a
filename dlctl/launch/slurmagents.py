"""The agents of a Slurm job, for their coordinator, which stays where it was started.

Orders go through a shared directory (`orderfiles`) to the keepers that the job's srun starts. Every
few seconds a child process queries the state of the job with scontrol.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dlctl.errors import DlctlError, TimedOut, Unreachable
from dlctl.job.config import Host
from dlctl.launch import answers, base, orderfiles, slurmcalls, slurmscript, slurmwords
from dlctl.launch.commands import Command, CommandOutput, wait_for_any
from dlctl.launch.remote import begin_request, shared_request
from dlctl.launch.slurmrequest import SlurmRequest
from dlctl.launch.slurmwords import JobFacts
from dlctl.util import hints, regular
from dlctl.util.units import format_duration

log = logging.getLogger("dlctl")
RUNNING = "RUNNING"
POLL_S = 2.0
SOON_S = 0.2
PICKUP_S = 20.0
"""Time for a keeper to accept an order, while the job runs."""
BEGIN_S = 90.0
KILL_S = 5.0
SUBMIT_S = 5.0
ENDING_S = 5.0
"""Until a job whose processes were sent SIGTERM is not RUNNING any more."""
AGAIN_S = 10.0
"""Until the next try to submit or to cancel a job, if Slurm's controller does not answer."""
LISTED_S = 60.0
"""For a job whose number is not known to appear in the queue: sbatch may outlive the coordinator
that has called it, and squeue may lag behind it. An empty list is the end of the job only later."""
MINUTE_S = 60.0
"""Slurm's resolution of time limits."""
Json = orderfiles.Json


@dataclass(slots=True)
class _Agent:
    incarnation: int
    state: str
    """The phase of the agent: ordered, begins, up, ending, killing or gone."""
    since: float
    """Time of the latest change of `state`."""
    status: int | None = None
    """How it has ended."""


class SlurmAgents:
    def __init__(
        self,
        asked: SlurmRequest,
        directory: Path,
        hosts: Mapping[str, Host],
        watcher: base.Watcher,
        tell: Callable[[base.News], None],
        *,
        only: str = "",
        poll_s: float = POLL_S,
    ) -> None:
        """only: the agent whose job this is; "": the job is that of all agents."""
        self.asked = asked
        self.directory = directory
        self.only = only
        self.poll_s = poll_s
        self.names = list(hosts)
        self.watcher = watcher
        self.tell = tell
        self._handle = slurmcalls.read_handle(directory, only)
        self._agents: dict[str, _Agent] = {}
        self._facts: JobFacts | None = None
        """Slurm's latest answer; None: none yet."""
        self._attempt: int | None = None
        self._running_since: float | None = None
        self._queued_at = time.monotonic()
        """Or when this coordinator began."""
        self._command: tuple[Command, Callable[[CommandOutput], None]] | None = None
        self._due_at = 0.0
        self._noticed: int | None = -1
        """The attempt whose notice was reported."""
        self._order: base.StartOrder | None = None
        """The newest one."""
        self._was_cancelled = False
        """Or is about to be."""
        self._is_unwanted = False
        """The job is to be cancelled as soon as its number is known and no command runs."""
        self._cancel_at = 0.0
        """Not before, because the last try has failed."""
        self.is_over = False
        """The job has ended, or could not be submitted: it is not used any more."""

    # ------------------------------------------------------------ calls of the coordinator

    def start(self, order: base.StartOrder) -> None:
        self._order = order
        try:
            if self._handle is None:
                self._submit()
            self._write(order)
        except DlctlError as error:
            self.tell(base.Ended(order.name, order.incarnation, error.exit_code, error))
            return
        except OSError as error:
            why = DlctlError(f"cannot start it: {error}")
            self.tell(base.Ended(order.name, order.incarnation, None, why))
            return
        self._agents[order.name] = _Agent(order.incarnation, "ordered", time.monotonic())
        self._due_at = min(self._due_at, time.monotonic() + SOON_S)

    def want(self, names: Collection[str]) -> None:
        """All agents of one job have a host, or none."""

    @property
    def is_ending(self) -> bool:
        """The job was cancelled, and is still there."""
        return self._was_cancelled and not self.is_over

    def keep(self) -> None:
        """Do not cancel the job, if that has not been done yet."""
        self._is_unwanted = False

    def cancel(self) -> None:
        """Give the node back: the job ends, and is reported as any end of it."""
        self._is_unwanted = self._handle is not None and not self.is_over
        if not (self._is_unwanted and self._handle and self._handle.job_id):
            return
        if self._command is None and time.monotonic() >= self._cancel_at:
            try:
                self._run(slurmcalls.cancel_argv(self._handle.job_id), self._on_cancelled)
                self._was_cancelled = True
            except (DlctlError, OSError) as error:
                self._not_cancelled(str(error))

    def _on_cancelled(self, output: CommandOutput) -> None:
        if output.status == 0 or slurmwords.is_ended(output):
            self._is_unwanted = False
        else:  # The controller may be restarting. The node is held, and paid for, meanwhile.
            self._was_cancelled = False
            self._not_cancelled(output.last_line() or "no answer")

    def _not_cancelled(self, why: str) -> None:
        log.warning("cannot cancel job %s, which is not needed any more: %s", self._job, why)
        self._cancel_at = time.monotonic() + AGAIN_S

    def kill(self, name: str) -> None:
        """Kill an agent by its keeper. Without an answer the node counts as dead."""
        agent = self._agents.get(name)
        if agent is None:
            return
        agent.state, agent.since = "killing", time.monotonic()
        if self._handle is None or self.is_over:
            self._ended(name, None)
            return
        try:
            path = orderfiles.kill(self._handle.directory, name)
            orderfiles.write(path, {"incarnation": agent.incarnation})
        except OSError as error:
            self._ended(name, None, DlctlError(f"cannot write the order to kill it: {error}"))
            return
        if self._facts and self._facts.waits:  # Once it runs, its keeper finds order and kill.
            self._ended(name, None)

    def adopt(self, recorded: dict[str, int]) -> dict[str, int]:
        """Nothing is known before the first answer; recorded agents can be killed."""
        now = time.monotonic()
        for name in self.names:
            if name in recorded and self._handle is not None:
                answer = orderfiles.read(orderfiles.answer(self._handle.directory, name))
                is_taken = answer.get("incarnation") == recorded[name]
                self._agents[name] = _Agent(recorded[name], "up" if is_taken else "ordered", now)
        return {}

    def look(self) -> None:
        if self._command is not None and self._command[0].is_late:
            self._finish_command()
        if self._handle is None and self.only and not self.is_over:
            self._try_again()
        if self._handle is None or self.is_over:
            return
        self._read_answers()
        self._check_notice()
        if self._is_unwanted:
            self.cancel()
        if self._command is None and time.monotonic() >= self._due_at:
            self._query()

    def close(self) -> None:
        self.settle()
        slurmcalls.end_in_words(self.directory)

    def forget(self) -> None:
        """Of a job that `is_over`: its directory is not used any more."""
        if self._handle is not None:
            self._handle.forget(self.directory, self.only)

    def settle(self) -> None:
        """Wait for the command that runs."""
        if self._command is not None:  # If it is sbatch, it is about to print the job id.
            wait_for_any([self._command[0].pidfd], SUBMIT_S)
            self._finish_command()

    # ------------------------------------------------------------ the job

    def _submit(self) -> None:
        """Submit the job. Raises DlctlError and OSError; then it may be tried again."""
        root = slurmcalls.root(self.asked.dir)
        handle = slurmcalls.new_handle(self.directory.name, root, self.only)
        orderfiles.make(handle.directory, slurmwords.SHARED)
        try:
            script = handle.directory / slurmscript.SCRIPT
            script.write_text(
                slurmscript.render(self.asked, handle.name, handle.directory, self.only)
            )
            handle.write(self.directory, self.only)
            self._run(slurmcalls.submit_argv(script), self._submitted)
        except BaseException:
            handle.forget(self.directory, self.only)
            raise
        self._handle, self._queued_at = handle, time.monotonic()

    def _submitted(self, output: CommandOutput) -> None:
        job_id = slurmwords.job_id(output)
        if not job_id:
            if slurmwords.is_unclear(output):  # Whether it exists, its name in the queue says.
                log.warning("sbatch got no answer; looking for the job %s", self._job)
            else:
                self._refused(slurmwords.refused(output))
            return
        self._note(job_id)
        nodes = f"{self.asked.nodes} nodes" if self.asked.nodes > 1 else "1 node"
        log.info("Slurm has accepted the run as job %s: %s", job_id, nodes)

    def _refused(self, error: DlctlError) -> None:
        """Without an answer of Slurm's controller the job of one agent is submitted later."""
        if not (self.only and isinstance(error, Unreachable)):
            self._fail(error)
            return
        self._resubmit(AGAIN_S)

    def _resubmit(self, pause_s: float = 0.0) -> None:
        assert self._handle is not None
        self._handle.forget(self.directory, self.only)
        self._handle, self._due_at = None, time.monotonic() + pause_s

    def _try_again(self) -> None:
        order = self._order
        agent = None if order is None else self._agents.get(order.name)
        if order is None or agent is None or agent.state != "ordered":
            return
        self.tell(base.Waiting(order.name, order.incarnation, "Slurm does not answer"))
        if time.monotonic() >= self._due_at and self._command is None:
            self.start(order)

    def _note(self, job_id: str) -> None:
        assert self._handle is not None
        self._handle = self._handle._replace(job_id=job_id)
        try:
            self._handle.write(self.directory, self.only)
        except OSError as error:
            log.warning("cannot note that the Slurm job is %s: %s", job_id, error)

    def _query(self) -> None:
        assert self._handle is not None
        self._due_at = time.monotonic() + self.poll_s
        try:
            if self._handle.job_id:
                self._run(slurmcalls.show_argv(self._handle.job_id), self._on_state)
            else:  # The coordinator that submitted the job died before it knew the id.
                self._run(slurmcalls.find_argv(self._handle.name), self._on_job_id)
        except (DlctlError, OSError) as error:  # Possibly temporary: retry.
            log.warning("cannot query the state of the Slurm job: %s", error)

    def _on_job_id(self, output: CommandOutput) -> None:
        words = output.out.split()
        if words:
            self._note(words[0])
        elif output.status != 0:
            log.warning("Slurm does not report its queue: %s", output.last_line() or "no answer")
            self._due_at = time.monotonic() + 5 * POLL_S
        elif time.monotonic() - self._queued_at < LISTED_S:
            limit = format_duration(LISTED_S)
            self._tell_waiting(f"job {self._job} is not in the queue yet (for at most {limit})")
        elif self.only and self._order is not None:  # It has not been accepted.
            self._resubmit()
        else:
            self._over(JobFacts(slurmwords.GONE))

    def _on_state(self, output: CommandOutput) -> None:
        facts, before = slurmwords.read(output), self._facts
        if facts is None:
            log.warning("Slurm does not report the state of its job: %s", output.last_line())
            self._due_at = time.monotonic() + 5 * POLL_S
            return
        self._facts = facts
        if self.only and facts.state == slurmwords.COMPLETING:
            self._complete()  # Its workers have the time that Slurm gives them to leave in order.
            return
        if self._attempt is not None and facts.restarts > self._attempt:
            self._lost_with_attempt(facts)
        self._attempt = facts.restarts
        is_new = before is None or before.state != facts.state
        if facts.state == RUNNING:
            for name, agent in self._agents.items():
                if agent.state == "ending" and time.monotonic() - agent.since > ENDING_S:
                    self._ended(name, agent.status)
        if is_new:
            log.info("job %s is %s %s", self._job, facts.state, facts.nodes or facts.reason)
        if facts.is_over:
            self._over(facts)
        elif facts.waits:
            if before is not None and not before.waits:
                self._queued_at = time.monotonic()
            self._running_since = None
            self._wait(facts)
        elif facts.state == slurmwords.COMPLETING:
            self._running_since = None  # The keepers are being killed and accept no orders.
        elif self._running_since is None:
            self._running_since = time.monotonic()

    @property
    def _job(self) -> str:
        """Its number, or its name until that is known."""
        return "" if self._handle is None else self._handle.job_id or self._handle.name

    def _wait(self, facts: JobFacts) -> None:
        """Report that the job is queued; fail after `queue_s`."""
        text = slurmwords.waiting(self._job, facts)
        waited_s = time.monotonic() - self._queued_at
        if waited_s > self.asked.queue_s:
            limit = format_duration(self.asked.queue_s)
            hint = "queue_s of launcher slurm limits the wait; sinfo -s shows what is free"
            self._fail(TimedOut(f"{text} for {limit}", where=slurmwords.WHERE, hint=hint))
            return
        self._tell_waiting(text)

    def _complete(self) -> None:
        """The job of one agent is being ended; whether it is requeued is not known yet."""
        text = f"job {self._job} is being ended"
        if self._noticed != self._attempt:
            self._noticed = self._attempt
            self.tell(base.Notice("saving", text))
        self._tell_waiting(text)

    def _tell_waiting(self, text: str) -> None:
        for name, agent in self._agents.items():
            if agent.state == "ordered":
                self.tell(base.Waiting(name, agent.incarnation, text))

    def _lost_with_attempt(self, facts: JobFacts) -> None:
        """Slurm has requeued the job: all agents of the previous attempt are gone."""
        text = f"job {self._job} has lost its nodes and was requeued"
        for name, agent in self._agents.items():
            why = f"{text}: {facts.reason}" if facts.reason else text
            if self.only:  # Whatever was ordered last: so is its worker.
                agent.state = "gone"
                self.tell(base.Taken(name, agent.incarnation, why))
            elif agent.state in ("begins", "up", "killing"):
                self._ended(name, None, Unreachable(why, where=f"job {self._job}"))

    def _over(self, facts: JobFacts) -> None:
        assert self._handle is not None
        self.is_over = True
        last = orderfiles.last_error(self._handle.directory / slurmscript.LOG)
        why = slurmwords.ending(self._job, facts, last)
        if self.only and facts.state not in slurmwords.TAKEN_AWAY:
            self._ended(self.only, 1, DlctlError(why, where=f"job {self._job}"))
        else:
            self.tell(base.Notice("over", why))

    def _fail(self, error: DlctlError) -> None:
        """Report that the run can get no hosts."""
        self.is_over = True
        log.warning("%s", error.message)
        if self.only:
            self._ended(self.only, error.exit_code, error)
            return
        self.tell(
            base.Notice(
                "over", "; ".join(filter(None, (error.message, hints.in_a_line(error.hint))))
            )
        )

    # ------------------------------------------------------------ orders and answers

    @cached_property
    def _shared(self) -> Json:
        return shared_request(self.directory)

    def _write(self, order: base.StartOrder) -> None:
        """Write an order for a keeper. Raises DlctlError and OSError."""
        assert self._handle is not None
        scratch = self.asked.scratch or f"/tmp/dlctl-slurm-{os.getuid()}"
        request = {**begin_request(self._shared, order), "dir": scratch}
        orderfiles.write(orderfiles.order(self._handle.directory, order.name), request)

    def _read_answers(self) -> None:
        assert self._handle is not None
        for name, agent in list(self._agents.items()):
            if agent.state == "gone":
                continue
            answer = orderfiles.read(orderfiles.answer(self._handle.directory, name))
            is_newest = answer.get("attempt", 0) >= (self._attempt or 0)
            if is_newest and answer.get("incarnation") == agent.incarnation:
                self._take(name, agent, answer)
            self._check_timeout(name, agent)

    def _take(self, name: str, agent: _Agent, answer: Json) -> None:
        state, node = answer.get("state"), str(answer.get("node", ""))
        if state == "begins" and agent.state == "ordered":
            agent.state, agent.since = "begins", time.monotonic()
        elif state == "up" and agent.state in ("ordered", "begins"):
            agent.state = "up"
            log.info("%s is on %s, in job %s", name, node, self._job)
        elif state == "failed" and agent.state != "up":
            error = self._explain(node, answer)
            self._ended(name, error.exit_code, error)
        elif state in ("ended", "failed"):
            status = answer.get("status")
            status = status if type(status) is int and state == "ended" else None
            if self.only and agent.state != "killing":
                self._look_why(agent, status)
            else:
                self._ended(name, status)

    def _look_why(self, agent: _Agent, status: int | None) -> None:
        """The agent of a job of its own has ended, perhaps because the job is being taken back:
        Slurm's next answer says it.
        """
        if agent.state != "ending":
            agent.state, agent.since, agent.status = "ending", time.monotonic(), status
            self._due_at = 0.0

    def _explain(self, node: str, answer: Json) -> DlctlError:
        """Why an agent could not start."""
        status = answer.get("status")
        if type(answer.get("value")) is not dict:
            last = orderfiles.last_error(self._directory / slurmscript.LOG)
            text = f"the agent could not start on {node} (exit {status}): {last or 'no output'}"
            return DlctlError(text, where=node)
        output = answers.CallResult(node, answer["value"], status if type(status) is int else 1, "")
        return slurmwords.in_our_terms(answers.explain(output))

    def _check_timeout(self, name: str, agent: _Agent) -> None:
        if self._running_since is None or self._facts is None or not self._facts.is_at_work:
            return
        limits_s = {"ordered": PICKUP_S, "begins": BEGIN_S, "killing": KILL_S}
        limit_s = limits_s.get(agent.state)
        late_s = time.monotonic() - max(agent.since, self._running_since)
        if limit_s is None or late_s < limit_s:
            return
        last = orderfiles.last_error(self._directory / slurmscript.LOG)
        error = Unreachable(
            f"the keeper of {name} has not answered for {limit_s:.0f} s on {self._facts.nodes}"
            + (f" ({last})" if last else ""),
            where=f"job {self._job}",
            hint=f"is {self._directory} the same on the nodes? sinfo -N shows their state",
        )
        self._ended(name, None if agent.state == "killing" else error.exit_code, error)

    @property
    def _directory(self) -> Path:
        assert self._handle is not None
        return self._handle.directory

    def _ended(self, name: str, status: int | None, error: DlctlError | None = None) -> None:
        agent = self._agents[name]
        if agent.state != "gone":
            agent.state = "gone"
            self.tell(base.Ended(name, agent.incarnation, status, error))

    def _check_notice(self) -> None:
        """Check whether the batch script has received Slurm's signal."""
        if self._facts is None or self._attempt == self._noticed:
            return
        path = self._directory / slurmscript.NOTICE
        try:
            output = regular.read_bytes(path).decode(errors="replace").strip()
        except OSError:
            return
        if output != str(self._attempt):
            return  # Of an earlier attempt.
        self._noticed = self._attempt if self._attempt is not None else -1
        left_s, limit = self._facts.left_s, self._facts.time_limit
        if left_s is not None and left_s <= self.asked.notice_s + 2 * MINUTE_S:
            text = f"job {self._job} is about to reach its time limit of {limit}"
            self.tell(base.Notice("ending", text))
        else:
            self.tell(base.Notice("saving", f"job {self._job} is about to lose its nodes"))

    # ------------------------------------------------------------ commands

    def _run(self, argv: list[str], then: Callable[[CommandOutput], None]) -> None:
        """Run one command at a time. Raises DlctlError if the command is missing, and OSError."""
        try:
            command = Command(argv, slurmcalls.COMMAND_S, slurmcalls.environment())
        except FileNotFoundError as error:
            raise slurmwords.not_run(error) from error
        self._command = command, then
        self.watcher.watch(command.pidfd, self._finish_command)

    def _finish_command(self) -> None:
        assert self._command is not None
        command, then = self._command
        self._command = None
        self.watcher.unwatch(command.pidfd)
        then(command.output())
