"""`dlctl doctor --nodes`: hosts that their owner gives for a check, at once or not at all.

Where the coordinator is to be a job as well, doctor runs once more in such a place: there it asks
for hosts of workers, and the links between both are those that the run needs.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.errors import DlctlError, UsageError
from dlctl.health import needs
from dlctl.health.findings import WARNING, Finding
from dlctl.health.needs import HERE, HostNeed
from dlctl.job import placement
from dlctl.job.config import Allocated
from dlctl.util import notes

if TYPE_CHECKING:
    from dlctl.job.config import JobFile
    from dlctl.launch.launcher import ControlPlace, Launcher
    from dlctl.launch.session import Session

THERE = "the coordinator's node"
THERE_S = 240.0


class NodesTried(NamedTuple):
    sessions: Mapping[str, Session]
    """Agent -> a session with a host that it may get."""
    findings: tuple[Finding, ...] = ()


def begin(job: JobFile, file: Path, launcher: Launcher, place: ControlPlace | None) -> NodesTried:
    """place: where the coordinator runs, if not here. Raises UsageError."""
    if launcher.takes_hosts or not launcher.places():
        raise UsageError(
            "--nodes is for hosts that are given by a batch system; this job has none",
            hint="dlctl doctor JOBFILE asks the hosts of [[hosts]]",
        )
    notes.note(f"asking {launcher.title} for nodes, for this check only ...")
    if place is not None:
        return NodesTried({}, tuple(_elsewhere(place, file, launcher.title)))
    try:
        own = launcher.trial()
    except DlctlError as error:
        return NodesTried({}, (Finding(HERE, "nodes", WARNING, error.message, error.hint or ""),))
    agents = [agent for agent, host in placement.agents(job.places).items() if host.is_other]
    return NodesTried(dict(zip(agents, own, strict=False)))


def needs_of(job: JobFile, sessions: Mapping[str, Session]) -> dict[str, HostNeed]:
    """What the hosts of these agents need."""
    every, hosts = needs.of(job, None), placement.agents(job.places)
    found = {}
    for agent, session in sessions.items():
        host = hosts[agent]
        if isinstance(host, Allocated):
            host = replace(host, name=session.host)
        found[agent] = every[agent]._replace(name=session.host, host=host)
    return found


def _elsewhere(place: ControlPlace, file: Path, title: str) -> list[Finding]:
    words = [sys.executable, "-P", "-m", "dlctl", "doctor", "--nodes", "--json", str(file)]
    argv = [*place.trial(), *words]
    try:
        ended = subprocess.run(
            argv, capture_output=True, text=True, timeout=THERE_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return [_renamed(row) for row in json.loads(ended.stdout)["findings"]]
    except subprocess.TimeoutExpired:
        why = f"no answer in {THERE_S:g} s"
    except OSError as error:
        why = str(error)
    except (ValueError, TypeError, KeyError, LookupError):
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit {ended.returncode}"
    text = f"{title} gives no node like the coordinator's now, or dlctl does not run there: {why}"
    return [Finding(THERE, title, WARNING, text, "try it by hand: " + shlex.join(argv))]


def _renamed(row: Mapping[str, Any]) -> Finding:
    """A finding of doctor there, in the words of here."""
    found = Finding(**row)
    if found.place == HERE:
        return replace(found, place=THERE)
    return replace(found, subject=found.subject.replace(HERE, THERE))
