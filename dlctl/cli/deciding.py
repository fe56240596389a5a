"""Which run a job file becomes when it is started; nothing is changed by finding that out.

An earlier run of the same job file goes on from its checkpoint if it was stopped or has failed (or
where it was, if nothing of it is lost); a live one with the same content is left alone; otherwise a
new run begins. `dlctl start` does what is decided here, `dlctl plan` tells it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.cli import knownruns, moved
from dlctl.cli.changes import Change, differences, from_live
from dlctl.cli.snapshot import Snapshot
from dlctl.errors import DlctlError, UsageError
from dlctl.util import hints

if TYPE_CHECKING:
    from dlctl.cli.recovery import Findings
    from dlctl.cli.resuming import Good
    from dlctl.config import JobFile

BEGIN, ALIVE, CHANGED, SECOND, FINISHED, ENDED, GO_ON, RESUME, AWAY, KEPT = (
    "begin", "alive", "changed", "second", "finished", "ended", "go on", "resume", "away", "kept",
)  # fmt: skip
"""A new run; it lives already; it lives with another content; --fresh while it lives; it has come
to this same end; it has ended, and how it goes on is for `examined` and `with_checkpoint` to say:
where it was; from a checkpoint; not until its hosts can be reached; not with another content, for
all that it did is kept, and no checkpoint has any of it."""
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
    """The newest run of this job file under this name, or one that was moved here with it."""
    if same := knownruns.of_job(knownruns.job_file(file), job.job.name):
        return same[-1]
    found = moved.newest(file, job)
    return None if found is None or moved.obstacle(found, file) else found


def to_go_on_from(file: Path, job: JobFile, *, fresh: bool) -> Snapshot | None:
    """The same for `start`. Raises DlctlError if the newest run cannot be read, for nobody knows
    then which run this job file becomes; unless a new one is wanted, and that has ended.
    """
    from dlctl.cli import unreadable

    previous = newest(file, job)
    unreadable.refuse(file, job, previous, fresh=fresh)
    return previous


def at_first(previous: Snapshot | None, file: Path, content: Json, *, fresh: bool) -> Decision:
    """What can be said at once; `content` is that of the job file, resolved."""
    if previous is None:
        return Decision(BEGIN)
    before = moved.read_job(previous, file)
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
    from dlctl.cli import belonging, doubtful, recovery

    previous = decision.previous
    if decision.way != ENDED or previous is None:
        return decision
    belonging.check_database(previous.directory)
    if previous.state != "failed" or not recovery.has_begun(previous):
        return decision
    findings = recovery.examine(previous, read_checkpoints=False, ask_hosts=ask_hosts)
    if not findings.has_updates:
        return decision
    ways = {recovery.AWAY: AWAY, recovery.GO_ON: GO_ON}
    takes_checkpoint = bool(decision.changes) or doubtful.has_way_back(previous)
    way = ENDED if takes_checkpoint else ways.get(findings.way, ENDED)
    return dataclasses.replace(decision, way=way, findings=findings)


def with_checkpoint(decision: Decision, job: JobFile, file: Path) -> Decision:
    """RESUME with the newest good checkpoint, every byte of which is read. Without any that has
    more than initial values: KEPT if all that the run did is there, else BEGIN. Any other decision
    as it is.

    Raises DlctlError if all are damaged: whether they can be given up is for their owner to say;
    UsageError if the newest good one does not fit.
    """
    from dlctl.cli import resuming
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
        raise resuming.all_damaged(decision, problems, file)
    if good is None:
        return dataclasses.replace(decision, way=KEPT if decision.could_go_on else BEGIN)
    resuming.check_fits(previous.run_id, good, job)
    return dataclasses.replace(decision, way=RESUME, checkpoint=good, damaged=problems)


def refusal(decision: Decision) -> DlctlError | None:
    """Why nothing can be started; None if that can be."""
    previous = decision.previous
    if previous is None or decision.way not in (SECOND, CHANGED, AWAY, KEPT):
        return None
    stop_it = f"dlctl stop -j {previous.run_id}"
    if decision.way == AWAY:
        from dlctl.cli import withouthosts

        assert decision.findings is not None
        return withouthosts.error(decision.findings)
    if decision.way == KEPT:
        from dlctl.cli import resuming

        return resuming.all_kept(decision)
    if decision.way == SECOND:
        text = f"{previous.run_id} still runs; this would begin a second run"
        return UsageError(text, hint=stop_it)
    return UsageError(
        f"{previous.run_id} runs with another content of this job file:\n"
        + "\n".join(f"  {change.text()}" for change in decision.changes),
        hint=hints.either(stop_it, hints.told("dlctl set --list", "says which keys change live")),
    )
