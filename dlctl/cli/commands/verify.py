"""`dlctl verify`: whether every acknowledged push is in the shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlctl.cli.group import command as make_command
from dlctl.cli.options import json_option, run_argument
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, Partial
from dlctl.runs import select
from dlctl.util import values

if TYPE_CHECKING:
    from dlctl.ops.verify import Judgement, Verdict

HEADERS = ("WORKER", "INC", "EPOCH", "SERVER", "ACKNOWLEDGED", "RECORDED", "LOST")
KEYS = ("worker", "incarnation", "epoch", "shard", "acknowledged", "recorded", "lost", "why")
UNKNOWN = "unknown"


@make_command(
    "verify",
    examples=[
        ("dlctl verify", "the running job, or the newest one"),
        ("dlctl verify mnist-7f3a --json | jq .lost", "for programs"),
    ],
    see_also=["recover", "checkpoint"],
)
@run_argument
@json_option
def command(job: str | None, as_json: bool) -> None:
    """Check that no acknowledged push was lost.

    Compares the acknowledgements that every incarnation of every worker received with the records
    of the shards: in the servers' stored states, else in the newest good checkpoint, every byte of
    which is read. Pushes acknowledged before a run rolled back to a checkpoint are not checked: the
    run's events have the cost of the rollback. The exit code is 1 if anything was lost, and 8 if no
    loss was found but some pushes could not be checked.
    """
    snapshot = select.look(job)

    from dlctl.ops import verify

    judged = verify.judge(snapshot)
    if as_json:
        console.out_json("dlctl.verify/1", _as_data(snapshot.run_id, judged))
    elif judged.verdicts:
        rows = [_row(verdict) for verdict in judged.verdicts]
        console.out(console.table(HEADERS, rows, ("INC", "EPOCH", *HEADERS[4:])))
    _conclude(snapshot.run_id, judged)


def _conclude(run_id: str, judged: Judgement) -> None:
    """Print the result. Raises DlctlError if something was lost, Partial if some are unknown.

    A push that cannot be checked proves nothing, and the message must not suggest otherwise.
    """
    if judged.before:
        console.warn(
            f"{acknowledged(judged.before)} from before the run rolled back to the "
            f"{judged.went_back or 'checkpoint'} are not checked"
        )
    for why, count in judged.unchecked.items():
        console.warn(f"{acknowledged(count)} cannot be checked: {why}")
    unchecked, events = judged.unchecked.total(), f"dlctl events -j {run_id}"
    if judged.lost:
        more = f"; {unchecked:,} more could not be checked" if unchecked else ""
        raise DlctlError(f"{run_id} has lost {acknowledged(judged.lost)}{more}", hint=events)
    pushes = acknowledged(judged.acknowledged)
    if unchecked:
        raise Partial(
            f"{run_id}: no loss found, but {unchecked:,} of {pushes} could not be checked",
            hint=events,
        )
    result = f"{pushes}, none lost" if judged.acknowledged else "no push was acknowledged so far"
    console.note(f"{console.escape(run_id)}: {result}")


def acknowledged(count: int) -> str:
    """As in "1,234 acknowledged pushes"."""
    return f"{count:,} acknowledged push{'' if count == 1 else 'es'}"


def _as_data(run_id: str, judged: Judgement) -> dict[str, Any]:
    found = judged.verdicts
    return {
        "run_id": run_id,
        "lost": judged.lost,
        "unknown": sum(1 for verdict in found if verdict.lost is None),
        "unchecked": judged.unchecked.total(),
        "acknowledged": judged.acknowledged,
        "records": [{key: getattr(verdict, key) for key in KEYS} for verdict in found],
        "witnesses": [{"shard": w.shard, "source": w.source} for w in judged.witnesses],
        "before": judged.before,
    }


def _row(verdict: Verdict) -> list[str]:
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
