"""Checks of the section [slurm]: options of sbatch, and conflicting keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dlctl.config import Slurm
from dlctl.jobfile.errors import Fault
from dlctl.jobfile.hosts import FULL_PATH
from dlctl.util.units import parse_duration

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:+-]*")
CONSTRAINT = re.compile(r"[A-Za-z0-9\[(][A-Za-z0-9_.&|*()\[\]-]*")
MEMORY = re.compile(r"[0-9]+[KMGT]?")
EXTRA = re.compile(r"--[a-z][a-z0-9-]*(=[^\0\r\n]*)?")
OWN = (
    "nodes", "partition", "time", "account", "qos", "constraint", "cpus-per-task", "gpus-per-node",
    "mem", "job-name", "ntasks", "ntasks-per-node", "signal", "output", "error", "open-mode",
    "chdir", "requeue", "no-requeue", "no-kill", "array", "export", "parsable", "wait", "wrap",
    "input", "test-only",
)  # fmt: skip
"""Options of sbatch that are not allowed in `extra`: dlctl sets them, or they have a key."""
_TEXTS = {
    "partition": (WORD, "must be the name of a partition"),
    "account": (WORD, "must be the name of an account"),
    "qos": (WORD, "must be the name of a quality of service"),
    "constraint": (CONSTRAINT, 'must be features, as in "gpu&ib"'),
    "memory": (MEMORY, 'must be a number with K, M, G or T, as in "16G"'),
    "python": (FULL_PATH, "must be a full path on the nodes"),
    "dir": (FULL_PATH, "must be a full path"),
    "scratch": (FULL_PATH, "must be a full path on the nodes"),
}


def check(document: dict[str, Any]) -> Iterator[Fault]:
    """All faults of this section; the schema reports values of a wrong type."""
    table = document.get("slurm")
    if not isinstance(table, dict):
        return
    nodes = table.get("nodes")
    if nodes is None:
        yield Fault(("slurm",), '"nodes" is missing', "nodes = 2 is two agents, one on each")
    elif type(nodes) is int and nodes < 1:
        yield Fault(("slurm", "nodes"), "must be >= 1", "without Slurm, leave the section out")
    if document.get("hosts"):
        message = "[[hosts]] and [slurm] exclude each other: Slurm chooses the hosts"
        yield Fault(("slurm",), message, "remove one of them")
    for key, (pattern, message) in _TEXTS.items():
        text = table.get(key)
        if isinstance(text, str) and text and not pattern.fullmatch(text):
            yield Fault(("slurm", key), message)
    yield from _check_time(table.get("time"), table.get("notice_s", Slurm().notice_s))
    yield from _check_extra(table.get("extra"))


def _check_time(text: Any, notice_s: Any) -> Iterator[Fault]:
    if not isinstance(text, str) or not text:
        return
    try:
        if parse_duration(text) <= 0:
            yield Fault(("slurm", "time"), "must be above zero")
        elif isinstance(notice_s, int | float) and notice_s >= parse_duration(text):
            message = f"must be more than notice_s ({notice_s:g} s), when the run is stopped"
            yield Fault(("slurm", "time"), message, "for a test, give less in notice_s")
    except ValueError as error:
        yield Fault(("slurm", "time"), str(error))


def _check_extra(options: Any) -> Iterator[Fault]:
    for number, option in enumerate(options if isinstance(options, list) else []):
        if not isinstance(option, str):
            continue
        path = ("slurm", "extra", number)
        name = option.partition("=")[0].removeprefix("--")
        if not EXTRA.fullmatch(option):
            yield Fault(path, "must be a long option of sbatch", 'as in "--reservation=lab"')
        elif name in OWN:
            yield Fault(path, f"--{name} is dlctl's own", "see the keys of [slurm]: dlctl man job")
