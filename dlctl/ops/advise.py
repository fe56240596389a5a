"""Advise on the method of a job: measure its step and its links, simulate a shortlist, and compare.

It is a comparison (`compare.py`) with the methods chosen, and one answer in place of the table.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dlctl.errors import DlctlError, UsageError
from dlctl.health import memory as host_memory
from dlctl.health.memory import HostMemory
from dlctl.ops import compare, doctor, simulate
from dlctl.ops.compare import Plan
from dlctl.runs import paths
from dlctl.sim.request import LinkSpeed
from dlctl.study import advice, variants
from dlctl.study.advice import Advice
from dlctl.util import notes, regular
from dlctl.util.hostnames import HERE
from dlctl.util.units import short_size

if TYPE_CHECKING:
    from dlctl.health.needs import Model
    from dlctl.job.config import JobFile

Json = dict[str, Any]
VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Advised:
    directory: Path
    """Of the comparison."""
    record: Json
    left_out: Mapping[str, str]
    """Method of the shortlist -> why it was not compared."""
    link: LinkSpeed | None
    advice: Advice | None
    """None: no method reached the target."""
    memory: Mapping[str, Mapping[str, HostMemory]]
    """Method -> host -> its memory."""


def advise(plan: Plan, slots: int) -> Advised:
    """Compare the methods of the plan or, if it names none, a shortlist. Raises UsageError for a
    job that cannot be simulated, or of which no method of the list can.
    """
    job = simulate.read(plan.file, plan.changes).job
    stop, document = compare.stop_of(plan), compare.document_of(plan.file)
    hosts = _examined(plan.file, job)
    link = plan.request.link or hosts.link
    model = _model(plan.file, job)
    names = plan.methods or _shortlist(job, model, link)
    request = replace(plan.request, link=link)
    chosen, left_out = [], {}
    memory: dict[str, Mapping[str, HostMemory]] = {}
    for name in names:
        try:
            if name in variants.PLAIN:
                raise UsageError("it is no method of dlctl; compare has it")
            changes = {**variants.overrides(document, name), **plan.changes, **stop}
            own = simulate.read(plan.file, changes).job
            simulate.check(own, request)
            memory[name] = host_memory.of_job(own, model, hosts.available_bytes)
            check_memory(memory[name])
            chosen.append(name)
        except UsageError as error:
            left_out[name] = error.message
    if not chosen:
        first = next(iter(left_out.items()))
        raise UsageError(f"no method can be simulated: {first[0]}: {first[1]}")
    plan = replace(plan, methods=tuple(chosen), request=request)
    directory, record = compare.compare(plan, slots)
    return Advised(directory, record, left_out, link, advice.of(record), memory)


@dataclass(frozen=True, slots=True)
class _Hosts:
    """What is known of the job's machines."""

    available_bytes: Mapping[str, int]
    """Host -> free memory."""
    link: LinkSpeed | None = None
    """The slowest one between them; None: no limit, or it could not be measured."""


def _examined(file: Path, job: JobFile) -> _Hosts:
    """Log in to the job's hosts, if it has any."""
    if not job.hosts:
        return _Hosts({HERE: int(psutil.virtual_memory().available)})
    findings = doctor.findings(file, job, None)
    free = {
        finding.place: int(finding.facts["available_bytes"])
        for finding in findings
        if finding.subject == "memory"
    }
    return _Hosts(free, _slowest_link([finding.facts for finding in findings]))


def check_memory(hosts: Mapping[str, HostMemory]) -> None:
    """Raises UsageError if a host has too little for the job."""
    for name, memory in hosts.items():
        if not memory.is_enough:
            needed, free = map(short_size, (memory.needed_bytes, memory.available_bytes or 0))
            raise UsageError(f"it needs {needed} of memory on {name}, where {free} are free")


def _slowest_link(found: Sequence[Mapping[str, Any]]) -> LinkSpeed | None:
    rates = [
        float(facts[key])
        for facts in found
        for key in ("up_bytes_per_s", "down_bytes_per_s")
        if facts.get(key)
    ]
    trips = [float(facts["round_trip_s"]) for facts in found if facts.get("round_trip_s")]
    if not rates or not trips:
        notes.warn("the links between the hosts could not be measured: give --link")
        return None
    return LinkSpeed(bytes_per_s=min(rates), latency_s=max(trips) / 2)


def _shortlist(job: JobFile, model: Model | None, link: LinkSpeed | None) -> Sequence[str]:
    nbytes = 0.0 if model is None else float(VALUE_BYTES * model.parameters)
    return advice.shortlist(job.algorithm.name, nbytes, None if link is None else link.bytes_per_s)


def _model(file: Path, job: JobFile) -> Model | None:
    """The model of an earlier checkpoint, or as the task builds it; None for a script that was
    never started. Raises DlctlError for a task that does not build it.
    """
    from dlctl.ops import built_model, plan

    try:
        model = plan.known_model(file, job)
    except DlctlError:  # It is damaged.
        model = None
    if model is None and not job.has_loop:
        model = built_model.built(job)
    return model


def write(file: Path, record: Mapping[str, Any], method: str) -> Sequence[str]:
    """Put the method, its tuned values and the other values of the comparison into the job file;
    returns the changed sections. All else of the text stays. Raises UsageError if the result would
    be another job than was simulated.
    """
    from dlctl.jobfile import rewriting

    document = compare.document_of(file)
    values: Json = {**record["plan"]["changes"], **record["tuned"][method]}
    changes = variants.overrides(document, method)
    is_own = method == variants.own_method(document)
    tables = {} if is_own else {k: v for k, v in changes.items() if "." not in k}
    if (servers := tables.get("servers")) and servers["count"]:
        del tables["servers"]
        values = {"servers.count": servers["count"], **values}
    dotted: Json = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if not name:
            tables[section] = value
            continue
        if section not in tables and section in changes:  # Of the method's own defaults.
            tables[section] = changes[section]
        if tables.get(section) is not None:
            tables[section] = {**tables[section], name: value}
        else:
            dotted[key] = value
    text = regular.read_bytes(file).decode()
    try:
        made = rewriting.rewritten(rewriting.retabled(text, tables), dotted)
    except UsageError as error:
        raise _by_hand(file, {**changes, **values}) from error
    mode = stat.S_IMODE(file.stat().st_mode)  # It may be private, and stays so.
    _check(file, made, {**changes, **values}, mode)
    paths.write(file.resolve(), made.encode(), mode)  # A link stays one.
    return sorted({*tables, *(key.partition(".")[0] for key in dotted)})


def _check(file: Path, made: str, changes: Mapping[str, Any], mode: int) -> None:
    """Raises UsageError unless this text is the job of the file with these changes."""
    wanted = simulate.read(file, changes).content
    trial = file.with_name(f".{file.name}.advised")
    paths.write(trial, made.encode(), mode)
    try:
        is_that = simulate.read(trial, {}).content == wanted
    except UsageError:
        is_that = False
    finally:
        trial.unlink()
    if not is_that:
        raise _by_hand(file, changes)


def _by_hand(file: Path, changes: Mapping[str, Any]) -> UsageError:
    shown = ", ".join(f"{key} = {value}" for key, value in changes.items())
    return UsageError(
        "the job file is written in a way that this cannot change", where=str(file),
        hint=f"write by hand: {shown}",
    )  # fmt: skip
