"""Which run a job file becomes when it is started; nothing is changed by finding that out.

An earlier run of the same job file goes on from its checkpoint if it was stopped or has failed (or
where it was, if nothing of it is lost); a live one with the same content is left alone; otherwise a
new run begins, with the checkpoint of the earlier one if the job file says another method or
optimiser. `dlctl start` does what is decided here, `dlctl plan` tells it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.errors import DlctlError, UsageError
from dlctl.ops import unreadable
from dlctl.runs import checkpoints, facts, lineage, lock, manifest, paths, select
from dlctl.runs.snapshot import Snapshot, Unreadable, load, newest_whole, read_job, started
from dlctl.settings import LiveSettings, flat, of_job
from dlctl.util import hints, notes, values
from dlctl.util.names import AVERAGE
from dlctl.util.text import plural

if TYPE_CHECKING:
    from dlctl.config import JobFile
    from dlctl.ops.remains import Findings

BEGIN, ALIVE, CHANGED, SECOND, FINISHED, ENDED, GO_ON, RESUME, AWAY, KEPT, BEGIN_FROM = (
    "begin", "alive", "changed", "second", "finished", "ended", "go on", "resume", "away", "kept",
    "begin from",
)  # fmt: skip
"""A new run; it lives already; it lives with another content; --fresh while it lives; it has come
to this same end; it has ended, and how it goes on is for `examined` and `with_checkpoint` to say:
where it was; from a checkpoint; not until its hosts can be reached; not with another content, for
all that it did is kept, and no checkpoint has any of it; with another method or optimiser, so that
a new run begins with its checkpoint."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    way: str
    previous: Snapshot | None = None
    """The newest run of this job file under this name."""
    changes: list[Change] = field(default_factory=list)
    """What the job file says otherwise than that run's; of one that lives, than is in force."""
    findings: Findings | None = None
    """Of a run that has failed while it trained."""
    checkpoint: Good | None = None
    damaged: list[str] = field(default_factory=list)
    """What is wrong with newer checkpoints than that."""

    @property
    def could_go_on(self) -> bool:
        """Whether all that an ended run did is kept, so that `recover` loses nothing of it."""
        return self.findings is not None and self.findings.way == "go on"


def newest(file: Path, job: JobFile) -> Snapshot | None:
    """The newest run of this job file under this name."""
    same = select.of_job(select.job_file(file), job.job.name)
    return same[-1] if same else None


def to_go_on_from(file: Path, job: JobFile, *, fresh: bool) -> Snapshot | None:
    """The same for `start`. Raises DlctlError if a newer run lies in this job's run directory that
    cannot be read, or was made for a job file that is not there any more: a new run that begins
    unnoticed costs all that the old one did. `fresh`: a new one is wanted; then this is so only as
    long as daemons of the old one live.
    """
    previous = newest(file, job)
    parent = (file.parent / job.job.run_dir).resolve()
    found = [path.resolve() for path in parent.glob(f"{job.job.name}-????") if paths.is_run(path)]
    since = 0.0 if previous is None else started(previous.directory)
    for directory in sorted(found, key=started, reverse=True):
        if started(directory) <= since or (fresh and not unreadable.living(directory)):
            continue
        if lock.original_of(directory) is not None:  # A copy is nobody's run.
            continue
        try:
            run = load(directory)
        except Unreadable as error:
            error.message = f"{directory.name} is of this job, and cannot be read: {error.message}"
            raise
        old = run.run.get("job_file")
        if previous is None and isinstance(old, str) and not os.path.lexists(old):
            raise _was_moved(run, old, file)
    return previous


def _was_moved(run: Snapshot, old: str, file: Path) -> DlctlError:
    """A run that came here with its project: it is found by the path of its job file."""
    typed, ways = shlex.quote(values.path(file)), list[str]()
    if (whole := newest_whole(run.directory)) is not None:
        start = f"dlctl start --from {shlex.quote(values.path(whole[0]))} {typed}"
        ways.append(hints.told(start, f"a new run goes on from step {whole[1]['step']:,}"))
    return DlctlError(
        f"{run.run_id} was made for {old}, which is not there any more: it was moved or copied",
        where=str(run.directory),
        hint=hints.either(*ways, hints.told(f"dlctl start --fresh {typed}", "begins anew")),
    )


def at_first(previous: Snapshot | None, file: Path, content: Json, *, fresh: bool) -> Decision:
    """What can be said at once; `content` is that of the job file, resolved."""
    if previous is None:
        return Decision(BEGIN)
    before = read_job(previous.directory)
    changes = differences(before, content)
    decision = Decision(ENDED, previous, changes)
    if previous.is_live:
        decision = Decision(ENDED, previous, from_live(previous, before, content))
        # What was changed live may be as the job file says it, or as it was: both are this run.
        way = SECOND if fresh else CHANGED if changes and decision.changes else ALIVE
    elif fresh:
        way = BEGIN
    elif previous.state == "finished" and before.get("job", {}).get("stop") == _goal(content):
        way = FINISHED
    else:
        way = ENDED
    return dataclasses.replace(decision, way=way)


def _goal(content: Json) -> Any:
    return content["job"]["stop"]


def examined(decision: Decision, *, ask_hosts: bool = True) -> Decision:
    """Of a run that has ended: GO_ON, AWAY, or ENDED as before: then it takes a checkpoint.

    Raises DlctlError for a directory that is not the run's own, and for a database of which any
    page is damaged: whoever goes on with it may give out terms that were given out before.
    """
    from dlctl.ops import next_step, remains
    from dlctl.runs import lock

    previous = decision.previous
    if decision.way != ENDED or previous is None:
        return decision
    lock.check_database(previous.directory)
    if previous.state != "failed" or not remains.has_begun(previous):
        return decision
    findings = remains.examine(previous, read_checkpoints=False, ask_hosts=ask_hosts)
    if not findings.has_updates:
        return decision
    ways = {remains.AWAY: AWAY, remains.GO_ON: GO_ON}
    takes_checkpoint = bool(decision.changes) or next_step.has_way_back(previous)
    way = ENDED if takes_checkpoint else ways.get(findings.way, ENDED)
    return dataclasses.replace(decision, way=way, findings=findings)


def with_checkpoint(decision: Decision, job: JobFile, file: Path) -> Decision:
    """RESUME or BEGIN_FROM with the newest good checkpoint, every byte of which is read. Without
    any that has more than initial values: KEPT if all that the run did is there, else BEGIN. Any
    other decision as it is.

    Raises DlctlError if all are damaged: whether they can be given up is for their owner to say;
    UsageError if the newest good one does not fit.
    """
    from dlctl.runs import checkpoints, manifest, preferred

    previous = decision.previous
    if decision.way != ENDED or previous is None:
        return decision
    problems: list[str] = []
    ordered = preferred.order(previous.directory)
    good = checkpoints.newest_good(previous.directory, problems.append, ordered)
    if good is not None and not manifest.has_updates(good[1]):
        good = None
    if good is None and problems:
        raise all_damaged(decision, problems, file)
    if good is None:
        return dataclasses.replace(decision, way=KEPT if decision.could_go_on else BEGIN)
    check_fits(previous.run_id, good, job)
    way = BEGIN_FROM if manifest.otherwise(good[1], job) else RESUME
    return dataclasses.replace(decision, way=way, checkpoint=good, damaged=problems)


def refusal(decision: Decision) -> DlctlError | None:
    """Why nothing can be started; None if that can be."""
    previous = decision.previous
    if previous is None or decision.way not in (SECOND, CHANGED, AWAY, KEPT):
        return None
    stop_it = f"dlctl stop -j {previous.run_id}"
    if decision.way == AWAY:
        from dlctl.ops import recover

        assert decision.findings is not None
        return recover.error_without_hosts(decision.findings)
    if decision.way == KEPT:
        return all_kept(decision)
    if decision.way == SECOND:
        text = f"{previous.run_id} still runs; this would begin a second run"
        return UsageError(text, hint=stop_it)
    return UsageError(
        f"{previous.run_id} runs with another content of this job file:\n"
        + "\n".join(f"  {change.text()}" for change in decision.changes),
        hint=hints.either(stop_it, hints.told("dlctl set --list", "says which keys change live")),
    )


# ---------------------------------------------------------------- from a checkpoint
# Which checkpoint an ended run goes on from when its job file is started again, and the price.


Good = tuple[Path, dict[str, Any]]
"""A checkpoint and its manifest."""
LOSSLESS = "nothing is lost with"


def check_fits(run_id: str, good: Good, job: JobFile) -> None:
    """Raises UsageError if a job cannot go on with a checkpoint of this run."""
    if manifest.otherwise(good[1], job):
        from dlctl.algorithms import translation

        translation.check(good[1], job)
    if job.average.ema and AVERAGE not in checkpoints.slots(*good):
        raise UsageError(
            f"{run_id} was trained without [average]: its checkpoint has none to go on with",
            hint="remove [average], or begin a new run with --fresh",
        )


def tell(decision: Decision) -> None:
    """From where an ended run goes on, or that it cannot."""
    previous = decision.previous
    assert previous is not None
    name = previous.run_id
    warn_of_damage(decision)
    if decision.checkpoint is None:
        notes.note(f"{name} ({previous.state}) has no checkpoint to go on from; a new run begins")
        return
    if manifest.is_doubtful(decision.checkpoint[1]):
        number = decision.checkpoint[1]["number"]
        told = "its model may be ruined; if it fails again, --fresh begins anew"
        notes.warn(f"{lineage.saved_at_failure([number])}: {told}")
    step, steps = values.count(decision.checkpoint[1]["step"]), steps_again(decision)
    again = f", {plural(steps, 'step')} {'is' if steps == 1 else 'are'} done again" if steps else ""
    notes.note(f"resumes {name} from step {step}{again}; --fresh starts a new run")


def warn_of_damage(decision: Decision) -> None:
    for problem in decision.damaged:
        notes.warn(problem)


def warn_of_loss(decision: Decision) -> None:
    """What is given up although all of it is kept, and how it would not be."""
    if not decision.could_go_on or not (again := done_again(decision)):
        return
    notes.warn(f"{why_back(decision)}: {again}; {without_loss(decision)}")


def why_back(decision: Decision) -> str:
    """Why a run that could go on where it was goes back to a checkpoint."""
    from dlctl.ops import next_step

    assert decision.previous is not None
    if next_step.is_ruined(decision.previous):
        return next_step.RUINED
    return "the job file has changed"


def without_loss(decision: Decision) -> str:
    """How nothing would be given up of a run all of which is kept."""
    from dlctl.ops import next_step

    assert decision.previous is not None
    if next_step.is_ruined(decision.previous):
        return f"it goes on there with: dlctl recover -j {decision.previous.run_id}"
    return f"{LOSSLESS}: {lossless(decision.previous)}"


def steps_again(decision: Decision) -> int:
    """How many steps an ended run has done since the checkpoint that it would go back to."""
    previous, good = decision.previous, decision.checkpoint
    if previous is None or good is None:
        return 0
    seen = values.number(previous.run.get("step")) or 0.0
    reached = int(seen) if decision.findings is None else decision.findings.step
    return max(0, reached - int(good[1]["step"]))


def lost_updates(decision: Decision) -> int:
    """How many updates of all shards are not in the checkpoint, as far as that is known."""
    from dlctl.ops import remains

    findings = decision.findings
    if findings is None or decision.checkpoint is None:
        return 0
    found = dataclasses.replace(findings, way=remains.RESUME, checkpoint=decision.checkpoint)
    return sum(updates or 0 for updates in found.lost_updates().values())


def done_again(decision: Decision) -> str:
    """As in "26,160 steps after the checkpoint at step 30,000 are done again", or the updates of
    steps that do not count yet; "" if there are none.
    """
    if decision.checkpoint is None:
        return ""
    what, verb, count = "step", "done again", steps_again(decision)
    if not count:
        what, verb, count = "update", "lost", lost_updates(decision)
    if not count:
        return ""
    saved = values.count(decision.checkpoint[1]["step"])
    counted = f"{plural(count, what)} after the checkpoint at step {saved}"
    return f"{counted} {'is' if count == 1 else 'are'} {verb}"


def lossless(previous: Snapshot) -> str:
    """How a run all of which is kept takes another job file, and loses nothing."""
    from dlctl.ops import next_step

    name = previous.run_id
    start = f"dlctl start {next_step.job_file(previous)}"
    return f"dlctl recover -j {name} && dlctl stop -j {name} && {start}"


def _lossless(previous: Snapshot) -> str:
    """The same as a hint."""
    return hints.told(
        lossless(previous),
        "loses nothing: first it goes on with the old job file (dlctl set --list says which keys "
        "change live)",
    )


def all_kept(decision: Decision) -> DlctlError:
    """What to say if a run would have to be given up as a whole to take another job file."""
    from dlctl.ops import next_step

    previous, findings = decision.previous, decision.findings
    assert previous is not None
    assert findings is not None
    changes = "".join(f"\n  {change.text()}" for change in decision.changes)
    return DlctlError(
        f"the job file has changed, and {previous.run_id} has no checkpoint: all of its "
        f"{findings.done} would be given up, which are kept{changes}",
        where=str(previous.directory),
        hint=hints.either(
            _lossless(previous),
            hints.told(f"dlctl start --fresh {next_step.job_file(previous)}", "gives them up"),
        ),
    )


def all_damaged(decision: Decision, problems: list[str], file: Path) -> DlctlError:
    """What to say if a run has checkpoints, and none of them is good."""
    from dlctl.ops import next_step

    previous = decision.previous
    assert previous is not None
    kept = _lossless(previous) if decision.could_go_on else ""
    damaged = facts.damaged_in_words(len(checkpoints.finished(previous.directory)))
    return DlctlError(
        f"{previous.run_id} cannot go on: {damaged}\n"
        + "\n".join(f"  {problem}" for problem in problems),
        where=str(previous.directory),
        hint=hints.either(
            kept, next_step.when_all_damaged(previous.run_id, shlex.quote(values.path(file)))
        ),
    )


def cost(decision: Decision, good: Good) -> str:
    """What it costs to go on from there, and why, for the run's events; "" if nothing is lost."""
    from dlctl.ops import remains

    previous, findings = decision.previous, decision.findings
    assert previous is not None
    if findings is not None and findings.way in (remains.GO_ON, remains.RESUME):
        found = dataclasses.replace(findings, way=remains.RESUME, checkpoint=good)
        return remains.cost(found, why_back(decision))
    step = values.number(previous.run.get("step")) or 0.0
    again = max(0, int(step) - int(good[1]["step"]))
    if not again:
        return ""
    why = lineage.skipped(previous.directory, good[0]) or "that is the newest one"
    return f"{plural(again, 'step')} {'is' if again == 1 else 'are'} done again, because {why}"


# ---------------------------------------------------------------- differences
# What two contents of a job file differ in, and what one differs in from a run that lives.


WORKERS = "workers.count"


class Change(NamedTuple):
    key: str
    before: Any
    """None: there is none. A list, if daemons of a run differ in it."""
    after: Any
    setting: str = ""
    """The live setting that the key says at first; "" if it is none."""

    def text(self) -> str:
        """As in "workers.count: 4 -> 8"."""
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"

    def how_live(self) -> str:
        """The command that makes this change in a running job; "" if none does."""
        if self.after is None:
            return ""
        if self.key == WORKERS:
            return f"dlctl scale worker={self.after}"
        name = self.setting
        return f"dlctl set {shlex.quote(f'{name}={self.after}')}" if name else ""


def not_live(content: Json, name: str) -> list[str]:
    """Keys of a job file that are called so, with their sections, and change with a restart only:
    ["servers.count"] of "servers.count" or "count".
    """
    live = of_job(content)
    keys = [key for key, _ in flat(content) if name in (key, key.partition(".")[2])]
    return [key for key in keys if not live.called(key)]


def differences(before: Json, after: Json) -> list[Change]:
    """Keys that differ between two contents of a job file."""
    return _differences(dict(flat(before)), dict(flat(after)), of_job(before))


def from_live(snapshot: Snapshot, before: Json, after: Json) -> list[Change]:
    """Keys in which `after` differs from what is in force in a run that lives. It was started with
    `before`; since then `set` and `scale` may have changed it.
    """
    old, new, live = dict(flat(before)), dict(flat(after)), of_job(before)
    if snapshot.run.get("ready_at") is not None:  # Before, the rows may be of an earlier execution.
        old[WORKERS] = sum(row.get("role") == "worker" for row in snapshot.daemons)
        for key in old:
            if name := live.called(key):
                old[key] = _in_force(snapshot, live, name, old[key], new.get(key))
    return _differences(old, new, live)


def still_set(snapshot: Snapshot, before: Json, after: Json) -> Json:
    """Daemon -> the live settings that an ended run goes on with: what was set, but for keys that
    the job file says otherwise since: then that counts.
    """
    known = snapshot.run.get("settings")
    overruled = {change.setting for change in differences(before, after)}
    kept = {
        name: {key: value for key, value in own.items() if key not in overruled}
        for name, own in (known.items() if isinstance(known, dict) else ())
        if isinstance(own, dict)
    }
    return {name: own for name, own in kept.items() if own}


def set_otherwise(settings: Json, content: Json) -> list[str]:
    """The settings that differ from the job file, as in "lr=0.05 of server-0 (job file: 0.1)"."""
    live, said = of_job(content), {}
    for path, value in flat(content):
        if name := live.called(path):
            said[name] = _plain(live, name, value)
    owners: dict[tuple[str, str, str], list[str]] = {}
    for name, own in settings.items():
        for key, value in own.items():
            if key in live.by_key and (key not in said or said[key] != value):
                in_file = live.format(key, said[key]) if key in said else "nothing"
                owners.setdefault((key, live.format(key, value), in_file), []).append(name)
    return [
        f"{key}={value} of {', '.join(sorted(names))} (job file: {in_file})"
        for (key, value, in_file), names in sorted(owners.items())
    ]


def _in_force(snapshot: Snapshot, live: LiveSettings, name: str, before: Any, after: Any) -> Any:
    """The value of a live setting, as the job file says it; a list if daemons differ in it."""
    known = snapshot.run.get("settings")
    found: list[Any] = []
    for row in snapshot.daemons:
        if row.get("role") in live.find(name).roles:
            own = known.get(row["name"]) if isinstance(known, dict) else None
            value = (
                own[name] if isinstance(own, dict) and name in own else _plain(live, name, before)
            )
            found += [value] if value not in found else []
    for text in (before, after):
        if found in ([], [_plain(live, name, text)]):
            return text
    shown = [live.format(name, value) if live.has_unit(name) else value for value in found]
    return shown[0] if len(shown) == 1 else shown


def _plain(live: LiveSettings, name: str, value: Any) -> Any:
    """A value of the job file as daemons have it: "5MB/s" is 5e6, and "off" is None."""
    return live.parse(name, value) if isinstance(value, str) else value


def _differences(old: Json, new: Json, live: LiveSettings) -> list[Change]:
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [Change(key, old.get(key), new.get(key), live.called(key)) for key in keys]


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        # As [[hosts]]: what is not said of one is of no interest.
        value = [{key: said for key, said in item.items() if said} for item in value]
    return "none" if value is None else json.dumps(value)
