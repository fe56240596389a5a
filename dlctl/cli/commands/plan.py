"""`dlctl plan`: what `dlctl start` would do; nothing is changed by asking."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlctl.cli.group import command as make_command
from dlctl.cli.options import json_option
from dlctl.cli.ui import console
from dlctl.errors import DlctlError
from dlctl.util import values

if TYPE_CHECKING:
    from dlctl.config import JobFile
    from dlctl.health.findings import Finding
    from dlctl.health.needs import Model
    from dlctl.ops.decide import Decision
    from dlctl.ops.plan import Placed

CHANGES_EXIT_CODE = 10


@make_command(
    "plan",
    examples=[
        ("dlctl plan job.toml", "which run it becomes, who runs where, which files"),
        ("dlctl plan job.toml --check", "and ask the hosts whether that will work"),
        ("dlctl plan job.toml --detailed-exitcode", "for scripts: 10 if there is anything to do"),
    ],
    see_also=["start", "doctor", "validate"],
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="What `start --fresh` would do.")
@click.option("--check", is_flag=True, help="Log in to the hosts, too; show what is in the way.")
@click.option(
    "--detailed-exitcode",
    "is_detailed",
    is_flag=True,
    help="Exit with 10 unless all that the job file says is in force or reached already.",
)
@json_option
def command(file: Path, fresh: bool, check: bool, is_detailed: bool, as_json: bool) -> None:
    """Show what start would do; change nothing.

    Which run the job file becomes, what differs from that run and which of it can be changed while
    it runs, where each daemon would be, and which files would be written. How large the shards are
    is known as soon as an earlier run of the same job file has saved a checkpoint, else after the
    first worker has built the model. No host is logged in to without --check. With it, the exit
    code is 1 if anything is in the way, as with `dlctl doctor`.
    """
    from dlctl import config, jobfile
    from dlctl.health.findings import FAULT
    from dlctl.ops import decide, plan

    job = jobfile.load(file)
    content = json.loads(json.dumps(config.to_dict(job)))
    previous = decide.to_go_on_from(file, job, fresh=fresh)
    decision = decide.at_first(previous, file, content, fresh=fresh)
    if decision.way == decide.SECOND and (refusal := decide.refusal(decision)):
        raise refusal
    decision = decide.examined(decision, ask_hosts=check)
    decision = decide.with_checkpoint(decision, job, file)
    if check and decision.way == decide.AWAY and (refusal := decide.refusal(decision)):
        raise refusal
    model = plan.known_model(file, job)
    faults = [f for f in _checked(file, job) if f.mark == FAULT] if check else []
    if as_json:
        _out_json(file, job, decision, model, faults)
    else:
        _show(file, job, decision, model, faults)
    if faults:
        raise DlctlError(
            "this will not work on all hosts", hint=f"dlctl doctor {shlex.quote(str(file))}"
        )
    if is_detailed and plan.is_change(decision):
        raise click.exceptions.Exit(CHANGES_EXIT_CODE)


def _checked(file: Path, job: JobFile) -> list[Finding]:
    from dlctl.ops import doctor

    return doctor.findings(file, job, None)


def _out_json(
    file: Path, job: JobFile, decision: Decision, model: Model | None, faults: list[Finding]
) -> None:
    from dlctl.ops import decide, plan

    previous, good = decision.previous, decision.checkpoint
    changes = [{"change": text, "live": live} for text, live in plan.changes(decision)]
    value: dict[str, Any] = {
        "file": str(file),
        "way": decision.way,
        "has_changes": plan.is_change(decision),
        "run_id": previous.run_id if previous is not None else None,
        "state": previous.state if previous is not None else None,
        "checkpoint_step": good[1]["step"] if good is not None else None,
        "done_again": decide.steps_again(decision),
        "changes": changes,
        "model": model._asdict() if model is not None else None,
        "daemons": [row._asdict() for row in plan.placed(job, model)],
        "files": dict(plan.files(decision, job, file)),
        "faults": [finding.to_dict() for finding in faults],
    }
    console.out_json("dlctl.plan/1", value)


def _show(
    file: Path, job: JobFile, decision: Decision, model: Model | None, faults: list[Finding]
) -> None:
    from dlctl.cli.commands import doctor
    from dlctl.jobfile import summary
    from dlctl.ops import plan

    console.out(console.escape(summary.of(job)))
    console.out(console.escape(plan.headline(decision)))
    for change, live in plan.changes(decision):
        console.out(console.escape(f"  {change}" + (f"   live: {live}" if live else "")))
    for line in plan.price(decision, job):
        console.out(console.escape(f"  {line}"))
    for problem in decision.damaged:
        console.warn(problem)
    console.out(f"\n{_table(job, plan.placed(job, model))}")
    console.out(f"  {_known(decision, model)}\n")
    rows = list(plan.files(decision, job, file))
    width = max(len(what) for what, _ in rows)
    for what, where in rows:
        console.out(console.escape(f"{what.ljust(width)}  {where}"))
    if faults:
        console.out()
        doctor.show(faults)


def _known(decision: Decision, model: Model | None) -> str:
    if model is not None:
        return f"{model.parameters:,} parameters, as saved at step {model.step:,}"
    if decision.previous is not None and decision.previous.is_live:
        return "how large the shards are is known after the first checkpoint"
    return "how large the shards are is known after the first worker has built the model"


def _table(job: JobFile, rows: list[Placed]) -> str:
    headers = ("NAME", "HOST", "ADDRESS", "PORT", "PARAMETERS", "SHARD", "BATCH")
    cells = [
        [
            row.name,
            console.escape(row.host),
            console.escape(row.address) or values.NOTHING,
            _port(job, row),
            values.count(row.parameters),
            values.size(row.size_bytes),
            row.batch_size if isinstance(row.batch_size, str) else values.count(row.batch_size),
        ]
        for row in rows
    ]
    return console.table(headers, cells, right=("PORT", "PARAMETERS", "SHARD", "BATCH"))


def _port(job: JobFile, row: Placed) -> str:
    if row.port is not None:
        return str(row.port)
    return "any free" if row.address and job.uses_tcp else values.NOTHING
