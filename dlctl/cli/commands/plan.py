"""`dlctl plan`: what `dlctl start` would do; changes nothing."""

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
    from dlctl.ops.cases import Case
    from dlctl.ops.plan import Placed

CHANGES_EXIT_CODE = 10


@make_command(
    "plan",
    examples=[
        ("dlctl plan job.toml", "which run, which daemons on which hosts, which files"),
        ("dlctl plan job.toml --check", "also check whether it will work on the hosts"),
        ("dlctl plan job.toml --detailed-exitcode", "for scripts: 10 if there is anything to do"),
    ],
    see_also=["start", "doctor", "validate"],
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="What `start --fresh` would do.")
@click.option("--check", is_flag=True, help="Also log in to the hosts and show problems.")
@click.option(
    "--detailed-exitcode",
    "is_detailed",
    is_flag=True,
    help="Exit with 10 unless the whole job file is already effective or reached.",
)
@json_option
def command(file: Path, fresh: bool, check: bool, is_detailed: bool, as_json: bool) -> None:
    """Show what start would do; change nothing.

    Shows which run the job file becomes, how it differs from that run and which of these keys
    change live, where each daemon would run, and which files would be written. The sizes of the
    shards are known once an earlier run of the same job file has saved a checkpoint, else after the
    first worker has built the model. Only --check logs in to hosts. With it, the exit code is 1 if
    there is a fault, as with `dlctl doctor`.
    """
    from dlctl import config, jobfile
    from dlctl.health.findings import FAULT
    from dlctl.ops import cases, doctor, plan
    from dlctl.ops.decide import Action

    job = jobfile.load(file)
    content = json.loads(json.dumps(config.to_dict(job)))
    previous = cases.newest(file, job)
    cases.check_no_other(file, job, previous, fresh=fresh)
    case = cases.looked(cases.of_start(previous, job, content, fresh=fresh), ask_hosts=check)
    refusal = cases.refusal(case)
    is_shown = case.action in plan.SHOWN and not (check and case.action is Action.WAIT_FOR_HOSTS)
    if refusal and not is_shown:
        raise refusal
    model = plan.known_model(file, job)
    found = doctor.findings(file, job, None) if check else []
    faults = [finding for finding in found if finding.mark == FAULT]
    if as_json:
        console.out_json("dlctl.plan/1", _as_data(file, job, case, model, faults))
    else:
        _show(file, job, case, model, faults)
    if faults:
        raise DlctlError(
            "this will not work on all hosts", hint=f"dlctl doctor {shlex.quote(str(file))}"
        )
    if is_detailed and plan.is_change(case):
        raise click.exceptions.Exit(CHANGES_EXIT_CODE)


def _as_data(
    file: Path, job: JobFile, case: Case, model: Model | None, faults: list[Finding]
) -> dict[str, Any]:
    from dlctl.ops import plan

    run, good = case.run, case.checkpoint
    return {
        "file": str(file),
        "way": case.action,
        "has_changes": plan.is_change(case),
        "run_id": run.run_id if run is not None else None,
        "state": run.state if run is not None else None,
        "checkpoint_step": good[1]["step"] if good is not None else None,
        "done_again": case.loss.steps,
        "changes": [{"change": text, "live": live} for text, live in plan.changes(case)],
        "model": model._asdict() if model is not None else None,
        "daemons": [row._asdict() for row in plan.placed(job, model)],
        "files": dict(plan.files(case, job, file)),
        "faults": [finding.to_dict() for finding in faults],
    }


def _show(file: Path, job: JobFile, case: Case, model: Model | None, faults: list[Finding]) -> None:
    from dlctl.cli.commands import doctor
    from dlctl.jobfile import summary
    from dlctl.ops import graft, plan

    lines = [summary.of(job), plan.headline(case)]
    lines += [
        f"  {text}" + (f"   live: {live}" if live else "") for text, live in plan.changes(case)
    ]
    lines += [f"  {case.loss.text()}"] if case.loss else []
    if case.checkpoint is not None and (words := graft.in_words(case.checkpoint, job)):
        lines.append(f"  {words}")
    console.out("\n".join(map(console.escape, lines)))
    for problem in case.damaged:
        console.warn(problem)
    console.out(f"\n{_table(job, plan.placed(job, model))}")
    size = "known after the first checkpoint"
    if model is not None:
        size = f"{model.parameters:,} parameters, as saved at step {model.step:,}"
    console.out(f"  size of the shards: {size}\n")
    rows = list(plan.files(case, job, file))
    width = max(len(what) for what, _ in rows)
    for what, where in rows:
        console.out(console.escape(f"{what.ljust(width)}  {where}"))
    if faults:
        console.out()
        doctor.show(faults)


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
