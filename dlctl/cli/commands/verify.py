"""`dlctl verify`: whether every acknowledged push is in the shards."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dlctl.cli.group import make_command
from dlctl.cli.options import json_option, run_argument
from dlctl.cli.ui import console
from dlctl.errors import DlctlError, Partial
from dlctl.runs import select

if TYPE_CHECKING:
    from dlctl.ops.verify import Verdict

COLUMNS = {
    "WORKER": "worker", "INCARNATION": "incarnation", "TERM": "epoch", "SHARD": "shard",
    "ACKNOWLEDGED": "acknowledged", "RECORDED": "recorded", "LOST": "lost",
}  # fmt: skip
"""Column -> key in `--json`, where the term still has the name that programs know."""


@make_command(
    "dlctl verify  # the running job, or the newest one",
    "dlctl verify mnist-7f3a --json | jq .lost  # for programs",
)
@run_argument
@json_option
def command(job: str | None) -> None:
    """Compares the acknowledgements that every incarnation of every worker received with the
    records of the shards: in the servers' stored states, else in the newest good checkpoint, every
    byte of which is read. Pushes acknowledged before a run resumed from a checkpoint are not
    checked: the run's events have the cost of that, if any. The exit code is 1 if anything was
    lost, and 8 if no loss was found but some pushes could not be checked.
    """
    from dlctl.ops import verify

    snapshot = select.look(job)
    judged = verify.judge(snapshot)
    found = [_record(verdict) for verdict in judged.verdicts]
    data = {
        "run_id": snapshot.run_id,
        "lost": judged.lost,
        "unknown": sum(1 for record in found if record["lost"] is None),
        "unchecked": judged.unchecked.total(),
        "acknowledged": judged.acknowledged,
        "records": found,
        "witnesses": [{"shard": w.shard, "source": w.source} for w in judged.witnesses],
        "before": judged.before,
    }
    cells = ({column: record[key] for column, key in COLUMNS.items()} for record in found)
    console.show("dlctl.verify/1", data, console.table(cells))
    if judged.before:
        before = f"{acknowledged(judged.before)} from before the run resumed from a checkpoint"
        cost = f"dlctl events -j {snapshot.run_id} shows what that cost, if anything"
        console.warn(f"{before} are not checked: {cost}")
    for why, count in judged.unchecked.items():
        console.warn(f"{acknowledged(count)} cannot be checked: {why}")
    # A push that cannot be checked proves nothing, and the message must not suggest otherwise.
    lost, unchecked = judged.lost, judged.unchecked.total()
    counts = f"{lost:,} found lost, {unchecked:,} could not be checked"
    text = f"{snapshot.run_id}: {acknowledged(judged.acknowledged)}: {counts}"
    if lost or unchecked:
        kind = DlctlError if lost else Partial
        raise kind(text, hint=f"dlctl events -j {snapshot.run_id}")
    console.note(text)


def _record(verdict: Verdict) -> dict[str, Any]:
    values = asdict(verdict)
    return values | {"epoch": values.pop("term"), "lost": verdict.lost}


def acknowledged(count: int) -> str:
    """A count for people: "1,234 acknowledged pushes"."""
    return f"{count:,} acknowledged push{'' if count == 1 else 'es'}"
