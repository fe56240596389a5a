"""The facts about a job or a run to be started, planned or recovered, and the decision about it
(`decide.py`). Gathering them changes nothing.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.control import unresponsive
from dlctl.errors import DlctlError, Unreachable, UsageError
from dlctl.launch import local
from dlctl.ops import changes, checkpoint_choice, decide, next_step, other_hosts, problems, remains
from dlctl.ops.changes import KeyChange
from dlctl.ops.decide import Action, Facts, RunCase, SavedCase, Shards
from dlctl.ops.remains import Findings, RollbackLoss
from dlctl.records import manifest
from dlctl.runs import checkpoints, facts, lineage, lock, paths, select
from dlctl.runs.lineage import Good
from dlctl.runs.snapshot import Snapshot, check_records, load, read_job, started
from dlctl.util import hints, values
from dlctl.util.names import AVERAGE, RUN_IN_ADDRESS
from dlctl.util.text import is_poisoned

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

Json = dict[str, Any]


class Start(NamedTuple):
    """The job to be started."""

    file: Path
    job: JobFile
    content: Json
    """The resolved content of the job file."""


@dataclass(frozen=True, slots=True)
class Case:
    facts: Facts
    run: Snapshot | None = None
    """The newest run of the job, or the named run."""
    new: Start | None = None
    """None: the run is to be recovered."""
    changes: list[KeyChange] = field(default_factory=list)
    """How the job file differs from that run's; for a live run, from its effective settings."""
    number: int | None = None
    """The requested checkpoint."""
    findings: Findings | None = None
    checkpoint: Good | None = None
    """The checkpoint to start from: the newest good one, or the requested one."""
    damaged: list[str] = field(default_factory=list)
    """What is wrong with checkpoints newer than `checkpoint`."""

    @property
    def action(self) -> Action:
        table = decide.RECOVER if self.new is None else decide.START
        return decide.decide(table, self.facts)

    @property
    def loss(self) -> RollbackLoss:
        """What the action costs."""
        is_back = self.action in (Action.RESUME, Action.BEGIN_FROM, Action.REFUSE_NOTHING)
        if self.findings is not None:
            nothing = RollbackLoss(0, {shard.name: 0 for shard in self.findings.shards})
            return self.findings.loss(self.checkpoint) if is_back else nothing
        if not is_back or self.run is None or self.checkpoint is None:
            return RollbackLoss(0)
        return RollbackLoss(facts.steps_after(self.run, self.checkpoint[1]["step"]))

    @property
    def cost(self) -> str:
        """What a rollback loses and why; "" if nothing is lost."""
        if not (loss := self.loss) or self.run is None:
            return ""
        reasons = list(self.findings.obstacles) if self.findings is not None else []
        reasons += ["newer checkpoints are damaged"] if self.damaged else []
        if is_poisoned(self.run.reason):
            reasons.append(next_step.RUINED)
        elif self.findings is not None and self.facts.back:
            reasons.append("the job file has changed" if self.changes else "this was requested")
        return loss.text() + (f" ({'; '.join(reasons)})" if reasons else "")


def _state(run: Snapshot) -> RunCase:
    if run.is_live:
        return RunCase.LIVE
    return (
        RunCase(run.state) if run.state in (RunCase.STOPPED, RunCase.FINISHED) else RunCase.FAILED
    )


# ---------------------------------------------------------------- start, plan


def read(file: Path) -> Start:
    """Read a job file. Raises UsageError if it is invalid."""
    from dlctl import jobfile
    from dlctl.job import config  # imported late: they pull in pydantic

    job = jobfile.load(file)
    return Start(file, job, json.loads(json.dumps(config.to_dict(job))))


def newest(file: Path, job: JobFile) -> Snapshot | None:
    """The newest run of this job file under this name."""
    same = select.of_job(select.job_file(file), job.job.name)
    return same[-1] if same else None


def check_no_other(new: Start, previous: Snapshot | None, *, fresh: bool) -> None:
    """Raises DlctlError if this job's run directory has a run newer than `previous` that is
    unreadable, or was created for a job file that no longer exists: silently starting a new run
    would lose all progress of the old one. `fresh`: the caller wants a new run; then only live
    daemons of the old run prevent it.
    """
    file, job = new.file, new.job.job
    parent = (file.parent / job.run_dir).resolve()
    since = 0.0 if previous is None else started(previous.directory)
    found = [path.resolve() for path in parent.glob(f"{job.name}-????") if paths.is_run(path)]
    newer = [directory for directory in found if started(directory) > since]
    for directory in sorted(newer, key=started, reverse=True):
        is_given_up = fresh and not any(local.living(directory))
        if is_given_up or lock.origin(select.load_any(directory)) is not None:
            continue
        old = load(directory).run.get("job_file")
        if previous is None and isinstance(old, str) and not os.path.lexists(old):
            raise DlctlError(
                f"{directory.name} was created for {old}, which no longer exists",
                where=str(directory),
                hint=next_step.new_run(directory, shlex.quote(values.path(file))),
            )


def of_start(run: Snapshot | None, new: Start, *, fresh: bool) -> Case:
    """The case as known without slow reads."""
    content = new.content
    if run is None:
        return Case(Facts(fresh=fresh), new=new)
    before, state = read_job(run.directory), _state(run)
    changed = changes.differences(before, content)
    facts = Facts(
        run=state,
        fresh=fresh,
        goal_reached=before.get("job", {}).get("stop") == content["job"]["stop"],
        begun=state is RunCase.FAILED and remains.has_begun(run),
        back=bool(changed) or is_poisoned(run.reason),
    )
    if state is RunCase.LIVE:
        live = changes.from_live(run, before, content)
        # A live change may match the new job file, or the old one: both describe this run.
        facts = replace(facts, changed=bool(changed and live))
        changed = live
    return Case(facts, run, new, changed)


# ---------------------------------------------------------------- recover


def of_recover(run: Snapshot, *, from_checkpoint: bool = False, number: int | None = None) -> Case:
    """`number`: the requested checkpoint."""
    state = _state(run)
    if run.silent_s is not None:
        state = RunCase.SILENT
    elif state is RunCase.LIVE and not remains.is_led(run) and run.run.get("pid") is not None:
        state = RunCase.FAILED
    back = from_checkpoint or number is not None
    return Case(Facts(run=state, back=back), run, number=number)


# ---------------------------------------------------------------- slow reads


def looked(case: Case, *, ask_hosts: bool = True) -> Case:
    """The case with all facts that its action needs.

    Raises DlctlError for a directory that is not the run's own, for a database with a damaged page
    (a coordinator that resumes with it may reissue terms), and for a requested checkpoint that is
    damaged or missing; UsageError if the newest good one does not fit the job.
    """
    while (run := case.run) is not None and case.action.is_look:
        lock.check(run)
        check_records(run.directory)
        if case.action is Action.LOOK_AT_SHARDS:
            findings = remains.examine(run, ask_hosts=ask_hosts)
            facts = replace(case.facts, shards=_shards(case, findings))
            case = replace(case, findings=findings, facts=facts)
        else:
            case = _with_checkpoint(case, run)
    return case


def _shards(case: Case, findings: Findings) -> Shards:
    if findings.away and (findings.obstacles or case.facts.back):
        return Shards.AWAY
    if findings.obstacles:
        return Shards.LOST
    if findings.only_exits:
        return Shards.WHOLE
    return Shards.WHOLE if findings.was_at_work and findings.has_updates else Shards.EMPTY


def _with_checkpoint(case: Case, run: Snapshot) -> Case:
    """The case with the newest good checkpoint, or the requested one; reads every byte of it."""
    damaged: list[str] = []
    if case.number is not None:
        path = checkpoint_choice.numbered(run, str(case.number), [0])
        good: Good | None = (path, checkpoint_choice.checked(path))
    else:
        good = lineage.newest_good(run.directory, damaged.append)
    job = None if case.new is None else case.new.job
    if job is not None and good is not None and not manifest.has_updates(good[1]):
        good = None
    saved = SavedCase.DAMAGED if damaged else SavedCase.NONE
    if good is not None:
        saved = SavedCase.GOOD
        if job is not None:
            check_fits(run.run_id, good, job)
            saved = SavedCase.OTHER if manifest.otherwise(good[1], job) else SavedCase.GOOD
    facts = replace(case.facts, saved=saved)
    return replace(case, facts=facts, checkpoint=good, damaged=damaged)


def check_fits(run_id: str, good: Good, job: JobFile) -> None:
    """Raises UsageError if a job cannot resume from a checkpoint of this run."""
    from dlctl.optim import bounds  # imported late: it pulls in numpy

    bounds.of_job(job, manifest.layout(good[1]))
    if manifest.otherwise(good[1], job):
        from dlctl.ops import translation

        translation.check(good[1], job)
    if job.average.ema and AVERAGE not in checkpoints.slots(*good):
        raise UsageError(
            f"{run_id} was trained without [average]: its checkpoint has no average to resume from",
            hint="remove [average], or start a new run with --fresh",
        )


# ---------------------------------------------------------------- output


HEADLINES = {
    Action.BEGIN: "a new run starts",
    Action.BEGIN_FROM: "a new run starts from the checkpoint of {run} at step {step}",
    Action.RESUME: "{run} resumes from step {step}, from its checkpoint",
    Action.CONTINUE: "{run} resumes where it stopped, at step {step}: nothing is lost",
    Action.ALREADY_RUNNING: "{run} is already {state}",
    Action.OVER: "{run} has already {state}",
}
ENDS = "{run} ends, at step {step}, as it was about to: nothing is lost"
"""Of a run that is continued only to exit."""


def headline(case: Case) -> str:
    """What happens, in one line, or why it is refused."""
    if refused := refusal(case):
        return refused.message.partition("\n")[0]
    if case.action is Action.OVER and case.run is not None and case.run.state == RunCase.FINISHED:
        more = "to train on, use --fresh or a later stop in [job]"
        return f"{case.run.run_id} has already finished; {more}"
    step, template = None, HEADLINES[case.action]
    if case.findings is not None:
        step = case.findings.step
        template = ENDS if case.findings.only_exits and case.action is Action.CONTINUE else template
    step = case.checkpoint[1]["step"] if case.checkpoint is not None else step
    names = {} if case.run is None else {"run": case.run.run_id, "state": case.run.state}
    return template.format(**names, step=values.count(step))


def next_command(case: Case) -> str:
    """The next command, see `dlctl.util.hints`."""
    assert case.run is not None
    if refused := refusal(case):
        return refused.hint or ""
    if case.action is Action.OVER and case.run.state == RunCase.FINISHED:
        return f"dlctl start {next_step.job_file(case.run)}"
    acts = case.action in (Action.CONTINUE, Action.RESUME)
    if not acts or (case.run.run.get("state") == "failed" and not case.facts.back):
        return next_step.command(case.run)
    option = " --from-checkpoint" if case.facts.back else ""
    option = option if case.number is None else f" --checkpoint {case.number}"
    return f"dlctl recover{option} -j {case.run.run_id}"


def as_data(case: Case) -> Json:
    """A case of `dlctl recover` as JSON."""
    run, findings, checkpoint, loss = case.run, case.findings, case.checkpoint, case.loss
    assert run is not None
    data = {
        "run_id": run.run_id,
        "state": run.state,
        "reason": run.reason,
        "way": case.action,
        "checkpoint": None
        if checkpoint is None
        else {"directory": str(checkpoint[0]), "step": checkpoint[1]["step"]},
        "damaged": case.damaged,
        "lost_steps": loss.steps,
        "lost_updates": dict(loss.updates),
        **hints.as_data(next_command(case)),
    }
    if findings is not None:
        data |= {"causes": problems.lines(run), **asdict(findings)}
    return data


# ---------------------------------------------------------------- refusals


REFUSALS: dict[Action, tuple[type[DlctlError], str, str]] = {
    Action.REFUSE_SECOND: (
        UsageError,
        "{run} is still running; this would start a second run",
        "dlctl stop -j {run}",
    ),
    Action.REFUSE_CHANGED: (
        UsageError,
        "{run} is running with a different version of this job file{changes}",
        "dlctl stop -j {run}\nor: dlctl set --list\nshows which keys change live",
    ),
    Action.REFUSE_KEPT: (
        DlctlError,
        "{run} has no good checkpoint to roll back to, but its shards survive{damaged}{changes}",
        "dlctl recover -j {run}\nloses nothing and resumes with the previous job file\n"
        "or: {anew}\ndiscards them",
    ),
    Action.REFUSE_DAMAGED: (
        DlctlError,
        "{run} cannot resume: all of its checkpoints are damaged{damaged}",
        "dlctl checkpoint verify -j {run}\nor: {anew}",
    ),
    Action.REFUSE_NOTHING: (
        DlctlError,
        "nothing of {run} can be recovered: no good checkpoint{obstacles}{damaged}",
        "{anew}",
    ),
    Action.WAIT_FOR_HOSTS: (
        Unreachable,
        "{run} cannot resume without {hosts}{away}",
        "dlctl recover -j {run}\nwhen they can be reached again\n"
        "or: dlctl doctor {job_file}\nshows what is wrong there\nor: {without}",
    ),
}
"""The class, text and hint of each, see `dlctl.util.hints`."""


def refusal(case: Case) -> DlctlError | None:
    """Why the command is refused; None if it can act, or has to gather facts first."""
    run, findings = case.run, case.findings
    if run is None:
        return None
    if case.action is Action.REFUSE_SILENT:
        row, lasts = {**run.run, "daemons": run.daemons}, values.duration(run.silent_s)
        return unresponsive.mute(run.directory, row, lasts, str(run.directory))
    if case.action not in REFUSALS:
        return None
    kind, text, hint = REFUSALS[case.action]
    away = findings.away if findings is not None else {}
    hosts = [host.name for name, host in other_hosts.of(run).items() if name in away]
    job_file = next_step.job_file(run)
    words = {
        "run": run.run_id,
        "job_file": job_file,
        "anew": _anew(run, job_file),
        "changes": _indented(change.text() for change in case.changes),
        "damaged": _indented(case.damaged),
        "obstacles": _indented(findings.obstacles if findings is not None else ()),
        "hosts": ", ".join(hosts),
        "away": _indented(away.values()),
        "without": next_step.without(run, hosts) if hosts else "",
    }
    return kind(text.format(**words), where=str(run.directory), hint=hint.format(**words))


def _anew(run: Snapshot, job_file: str) -> str:
    """The next command if nothing on this machine is good: the mirror may have more."""
    fresh = f"dlctl start --fresh {job_file}"
    mirror = read_job(run.directory).get("checkpoints", {}).get("mirror")
    if not isinstance(mirror, str) or not mirror:
        return fresh
    address = mirror.replace(RUN_IN_ADDRESS, run.run_id)
    again = f"dlctl start --from {shlex.quote(address)} {job_file}"
    return f"{again}\ncontinues from its mirror\nor: {fresh}"


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)
