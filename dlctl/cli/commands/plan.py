"""`dlctl plan`: what `dlctl start` would do; changes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dlctl.cli.commands.doctor import lines as lines_of
from dlctl.cli.group import make_command
from dlctl.cli.options import file_argument, json_option
from dlctl.cli.ui import console
from dlctl.errors import DlctlError
from dlctl.health.findings import FAULT, Finding
from dlctl.health.needs import Model
from dlctl.job.config import JobFile
from dlctl.ops import cases, doctor, plan
from dlctl.ops.cases import Case
from dlctl.ops.decide import Action
from dlctl.util import values

CHANGES_EXIT_CODE = 10


@make_command(
    "dlctl plan job.toml  # which run, which daemons on which hosts, which files",
    "dlctl plan job.toml --check  # also check whether it will work on the hosts",
    "dlctl plan job.toml --model  # also the memory of each server, before the first start",
    "dlctl plan job.toml --detailed-exitcode  # for scripts: 10 if there is anything to do",
)
@file_argument
@click.option("--fresh", is_flag=True, help="What `start --fresh` would do.")
@click.option("--check", is_flag=True, help="Also log in to the hosts and show problems.")
@click.option("--model", "builds", is_flag=True, help="Also build the model, for its sizes.")
@click.option("--detailed-exitcode", is_flag=True, help="Exit with 10 if there is anything to do.")
@json_option
def command(file: Path, fresh: bool, check: bool, builds: bool, detailed_exitcode: bool) -> None:
    """Shows which run the job file becomes, how it differs from that run and which of these keys
    change live, where each daemon would run, and which files would be written. The sizes of the
    shards are known once an earlier run of the same job file has saved a checkpoint; with --model
    another process builds the model now. They have the optimiser's state in them, and what it keeps
    beside matrices; files that make a shard durable take about twice as much. Only --check logs in
    to hosts. With it, the exit code is 1 if there is a fault, as with `dlctl doctor`.
    """
    new = cases.read(file)
    job, previous = new.job, cases.newest(file, new.job)
    cases.check_no_other(new, previous, fresh=fresh)
    case = cases.looked(cases.of_start(previous, new, fresh=fresh), ask_hosts=check)
    refusal = cases.refusal(case)
    is_shown = case.action in plan.SHOWN and not (check and case.action is Action.WAIT_FOR_HOSTS)
    if refusal and not is_shown:
        raise refusal
    model = _built(job) if builds else plan.known_model(file, job)
    found = doctor.findings(file, job, None) if check else []
    faults = [finding for finding in found if finding.mark == FAULT]
    for problem in case.damaged:
        console.warn(problem)
    data = _as_data(file, job, case, model, faults)
    lines = _lines(data, job, case, faults)
    console.show("dlctl.plan/1", data, "\n".join(lines))
    if faults:
        raise DlctlError(
            "this will not work on all hosts", hint=f"dlctl doctor {shlex.quote(str(file))}"
        )
    if detailed_exitcode and plan.is_change(case):
        raise click.exceptions.Exit(CHANGES_EXIT_CODE)


def _built(job: JobFile) -> Model:
    from dlctl.ops import built_model  # imported late: it pulls in numpy

    return built_model.built(job)


def _as_data(
    file: Path, job: JobFile, case: Case, model: Model | None, faults: list[Finding]
) -> dict[str, Any]:
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
        "model": model.figures() if model is not None else None,
        "remarks": plan.remarks(job, model),
        "daemons": [row._asdict() for row in plan.placed(job, model)],
        "files": dict(plan.files(case, job, file)),
        "faults": [finding.to_dict() for finding in faults],
    }


def _lines(data: Mapping[str, Any], job: JobFile, case: Case, faults: list[Finding]) -> list[str]:
    from dlctl.jobfile import summary  # imported late: it pulls in pydantic
    from dlctl.ops import graft

    above = [summary.of(job), plan.headline(case)]
    for change in data["changes"]:
        live = f"   live: {change['live']}" if change["live"] else ""
        above.append(f"  {change['change']}{live}")
    above += [f"  {case.loss.text()}"] if case.loss else []
    if case.checkpoint is not None and (words := graft.in_words(case.checkpoint, job)):
        above.append(f"  {words}")
    size = "known after the first checkpoint"
    if model := data["model"]:
        known = "as the task builds it" if model["step"] is None else "as saved at step "
        known += "" if model["step"] is None else f"{model['step']:,}"
        size = f"{model['parameters']:,} parameters, {known}"
        beside = sum(row["matrix_bytes"] or 0 for row in data["daemons"])
        size += f"; {values.size(beside)} beside their matrices" if beside else ""
        of_method = max((row["method_bytes"] or 0 for row in data["daemons"]), default=0)
        name = job.algorithm.name
        size += f"; {name} keeps up to {values.size(of_method)} in each worker" * bool(of_method)
    any_free = "any free" if job.uses_tcp else None
    daemons = (
        {
            "NAME": row["name"],
            "HOST": row["host"],
            "ADDRESS": row["address"] or None,
            ">PORT": row["port"] or (any_free if row["address"] else None),
            ">PARAMETERS": values.count(row["parameters"]),
            ">SHARD": values.size(row["size_bytes"]),
            ">BATCH": row["batch_size"] or None,
        }
        for row in data["daemons"]
    )
    lines = [*map(console.escape, above), "", console.table(daemons)]
    files = ({"FILES": what, "PATH": path} for what, path in data["files"].items())
    lines += [f"  size of the shards: {size}"]
    lines += [f"  {console.escape(remark)}" for remark in data["remarks"]]
    lines += ["", console.table(files)]
    return lines + (["", *lines_of(faults)] if faults else [])
