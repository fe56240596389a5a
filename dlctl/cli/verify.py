"""`dlctl verify`: whether every push that was acknowledged is in the shards."""

from __future__ import annotations

from typing import Any

import click

from dlctl.cli import console, pick, values
from dlctl.cli.group import command as make_command
from dlctl.cli.options import complete_runs, job_option, json_option
from dlctl.errors import DlctlError, UsageError
from dlctl.text import plural

HEADERS = ("WORKER", "INC", "EPOCH", "SERVER", "ACKNOWLEDGED", "RECORDED", "LOST")
UNKNOWN = "unknown"


@make_command(
    "verify",
    examples=[
        ("dlctl verify", "the job that runs, or the newest one"),
        ("dlctl verify mnist-7f3a --json | jq .lost", "for programs"),
    ],
    see_also=["recover", "checkpoint"],
)
@click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_runs)
@job_option
@json_option
def command(run: str | None, job: str | None, as_json: bool) -> None:
    """Check that no acknowledged push was lost.

    Compares what every incarnation of every worker was told to be applied with what the shards have
    on record: in the states that the servers keep, else in the newest checkpoint. A run that went
    back to a checkpoint has lost what came after it, and this says how much. The exit code is 1 if
    anything was lost.
    """
    if run is not None and job is not None and run != job:
        raise UsageError(f'the run is given twice: "{run}" and -j "{job}"')
    snapshot = pick.pick(run or job)

    from dlctl.cli import verdicts

    found, witnesses = verdicts.judge(snapshot)
    lost = sum(v.lost or 0 for v in found)
    unknown = sum(1 for v in found if v.lost is None and v.acknowledged)
    if as_json:
        data = {
            "run_id": snapshot.run_id,
            "lost": lost,
            "unknown": unknown,
            "acknowledged": sum(v.acknowledged for v in found),
            "records": [_as_data(v) for v in found],
            "witnesses": [{"shard": w.shard, "source": w.source} for w in witnesses],
        }
        console.out_json("dlctl.verify/1", data)
    elif found:
        rows = [_row(v) for v in found]
        console.out(console.table(HEADERS, rows, ("INC", "EPOCH", *HEADERS[4:])))
    name = console.escape(snapshot.run_id)
    if unknown:
        console.warn(
            f"{plural(unknown, 'count')} cannot be checked: the shards know newer processes of "
            "these workers only"
        )
    if lost:
        raise DlctlError(
            f"{snapshot.run_id} has lost {lost:,} acknowledged push{'' if lost == 1 else 'es'}",
            hint=f"dlctl events -j {snapshot.run_id}",
        )
    pushes = sum(v.acknowledged for v in found if v.lost is not None)
    told = f"{values.count(pushes)} acknowledged pushes, none lost" if found else "no push so far"
    console.note(f"{name}: {told}")


def _as_data(verdict: Any) -> dict[str, Any]:
    keys = ("worker", "incarnation", "epoch", "shard", "acknowledged", "recorded", "lost")
    return {key: getattr(verdict, key) for key in keys}


def _row(verdict: Any) -> list[str]:
    lost, recorded = verdict.lost, verdict.recorded
    shown = UNKNOWN if lost is None else values.count(lost)
    return [
        verdict.worker,
        str(verdict.incarnation),
        str(verdict.epoch),
        f"server-{verdict.shard}",
        values.count(verdict.acknowledged),
        UNKNOWN if recorded is None else values.count(recorded),
        console.style(shown, fg="red") if lost else shown,
    ]
