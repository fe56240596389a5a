"""`dlctl stop`: stop a run gracefully, wait for its end, and leave no process behind."""

from __future__ import annotations

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import duration, job_option
from dlctl.cli.ui import console, live, report
from dlctl.errors import DlctlError, Partial
from dlctl.ops import next_step, other_hosts, problems, stop
from dlctl.runs import facts, select
from dlctl.runs.snapshot import Snapshot, load
from dlctl.util import values
from dlctl.util.text import plural


@make_command(
    "dlctl stop  # finish the steps, save a checkpoint, end all daemons",
    "dlctl stop --no-checkpoint  # without saving",
    "dlctl stop --grace 5s  # less time for the workers' last steps",
    "dlctl stop --kill  # at once; unsaved progress is lost",
)
@click.option(
    "--grace", "grace_s", type=duration, metavar="TIME", default="30s", help="For last steps (30s)."
)
@click.option("--no-checkpoint", is_flag=True, help="Do not save a checkpoint first.")
@click.option("--kill", is_flag=True, help="Kill everything at once.")
@job_option
def command(grace_s: float, no_checkpoint: bool, kill: bool, job: str | None) -> None:
    """The workers finish their steps and last pushes, the servers save, then all daemons exit. A
    stopped job resumes from its checkpoint with "dlctl start". Stopping a stopped job does nothing.
    If the coordinator and its agent have died, the daemons they left behind are terminated; the
    servers' stored state stays, and "dlctl recover" resumes from it. --kill removes it too.
    Invitations end: write new ones with "dlctl keys invite" after the next start. The exit code is
    8 if the job has stopped but steps are lost because its last checkpoint failed.
    """
    snapshot = select.look(job, is_any=kill)
    if snapshot.state == select.UNREADABLE:
        away = stop.kill_all(snapshot)
        console.note(f"no process of {snapshot.run_id} is left here")
    elif snapshot.is_live:
        save, invited = not (no_checkpoint or kill), stop.invited(snapshot)
        after = stop.stop(
            snapshot, checkpoint=save, grace_s=grace_s, kill=kill, tell=live.note_progress
        )
        run_id, done = after.run_id, values.count(after.run.get("step"))
        console.note(f"{run_id} {after.state} at step {done}")
        if after.run.get("checkpoint"):
            console.note(f"checkpoint  {report.newest_checkpoint(after)}")
        if invited:
            console.note(
                f"the invitations of {', '.join(invited)} have ended: invite again after the start"
            )
        if lost := other_hosts.not_ended(after):
            console.warn(
                f"{', '.join(lost)} could not be reached: its processes exit on their "
                f"own within ten minutes, or with dlctl stop --kill -j {run_id}"
            )
        if after.state == "failed" and not kill:
            raise _not_graceful(after)
        if save:
            _require_saved(after)
        return
    else:
        ended, away = stop.end_left(snapshot, grace_s, kill=kill)
        if not ended and not away:
            text = f"{snapshot.run_id} has already ended ({snapshot.state})"
            console.note(f"{text}; no process of it is left")
    if held := stop.kept(snapshot):
        stays = f"stays; dlctl stop --kill -j {snapshot.run_id} removes it"
        console.note(
            f"its stored state ({plural(held, 'shard')}) {'is removed' if kill else stays}"
        )
    if kill:
        stop.remove_kept(snapshot)
    elif (step := next_step.of(load(snapshot.directory))) is not None:
        console.note(console.next_lines(step.text(), ""))
    stop.require_reached(select.load_any(snapshot.directory), away)


def _not_graceful(after: Snapshot) -> DlctlError:
    what = f"{after.run_id} has ended, but not gracefully"
    for problem in problems.found(after):
        if problem.code == "coordinator-gone" and "cause" in problem.facts:
            why = f"that could not be recorded: {problem.facts['why']}"
            return DlctlError(f"{what}, and {why}", hint=problems.fix(after, problem))
    return DlctlError(f"{what}: {after.reason}", hint=f"dlctl logs coordinator -j {after.run_id}")


def _require_saved(snapshot: Snapshot) -> None:
    """Raises Partial if the requested checkpoint was not saved, unless no worker had begun: then
    there was nothing to save.
    """
    error, has_older = snapshot.run.get("checkpoint_error"), bool(snapshot.run.get("checkpoint"))
    if has_older and not error:
        return
    if not error and not facts.has_begun(snapshot):
        console.note("no checkpoint was saved: the run stopped before training had begun")
        return
    why = f"the last checkpoint failed: {error}" if error else "no checkpoint was saved"
    if not has_older:
        why += "\nthere is no older checkpoint: the next start trains from the beginning"
    what = f"{snapshot.run_id} has {snapshot.state}, but {why}"
    raise Partial(what, hint=next_step.command(snapshot))
