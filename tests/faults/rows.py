"""The rows of the table: what a fault is, how it is done many times, and what came of it."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from . import ledger
from .job import Broken, Job, Options, pause

IMPORTS = 3
Need = Callable[[], str]
"""Why a row cannot be tried here; "" if it can."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """One fault, as it was seen. Times in seconds since the fault began (or was healed)."""

    detect_s: float | None = None
    resume_s: float | None = None
    others_gap_s: float | None = None
    """The longest time in which one of those that the fault does not concern got nothing done."""
    false_failovers: int = 0
    """Daemons that were replaced without being concerned."""
    problems: list[str] = field(default_factory=list)

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)


@dataclass(slots=True)
class Result:
    name: str
    must: str
    seed: int
    times: int = 0
    skipped: str = ""
    incidents: list[Incident] = field(default_factory=list)
    verdict: ledger.Verdict = ledger.NOTHING
    fenced: int = 0
    rejected: int = 0
    redone: int | None = 0
    """Steps whose gradients are in the weights and whose portion was computed again."""
    jobs: int = 0
    seconds: float = 0.0
    import_torch_s: float | None = None
    """Beside this row's job, if it was of interest."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.skipped and not self.problems

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.is_good}


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    must: str
    times: int
    body: Callable[[Trial], None]
    needs: tuple[Need, ...]


ROWS: dict[str, Row] = {}


def row(
    name: str, must: str, times: int = 20, needs: tuple[Need, ...] = ()
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Register a fault. Its function gets a `Trial`, and does the fault `trial.times` times."""

    def register(body: Callable[[Trial], None]) -> Callable[[Trial], None]:
        assert name not in ROWS
        ROWS[name] = Row(name, must, times, body, needs)
        return body

    return register


# ---------------------------------------------------------------- what a row may need


def root() -> str:
    return "" if os.geteuid() == 0 else "not root"


def tool(name: str) -> Need:
    return lambda: "" if shutil.which(name) else f"no {name} here"


# ---------------------------------------------------------------- doing it


class Trial:
    """One row at work."""

    def __init__(self, result: Result, rng: random.Random) -> None:
        self.result = result
        self.rng = rng
        self.times = result.times

    def import_torch_s(self) -> float:
        """Seconds to import torch beside the running job; measured once per row."""
        if self.result.import_torch_s is None:
            self.result.import_torch_s = seconds_to_import_torch()
        return self.result.import_torch_s

    def run(
        self,
        fault: Callable[[Trial, Job], Incident],
        options: Options | None = None,
        per_job: int = 1000,
        jobs: int = 1000,
        job_type: type[Job] = Job,
    ) -> None:
        """Do a fault at random instants, on as many jobs as it takes: `per_job` on one, and a new
        one when the account is used up. The ledger is asked at the end of each."""
        while jobs and len(self.result.incidents) < self.times:
            jobs -= 1
            job = job_type(options or Options())
            self.result.jobs += 1
            try:
                job.start()
                self._disturb(job, fault, per_job)
                self.judge(job)
            except Broken as broken:
                self._give_up(job, str(broken))
                return
            finally:
                job.close()

    def _disturb(self, job: Job, fault: Callable[[Trial, Job], Incident], per_job: int) -> None:
        for _ in range(per_job):
            job.until_all_step()
            pause(self.rng.uniform(0.05, 0.5))
            incident = fault(self, job)
            self.add(incident)
            if len(self.result.incidents) >= self.times or job.is_full():
                break
        job.until_all_step()

    def add(self, incident: Incident) -> None:
        """Count a fault that was done."""
        self.result.incidents.append(incident)
        number = len(self.result.incidents)
        self.result.problems += [f"{problem} (fault {number})" for problem in incident.problems]
        if incident.false_failovers:
            self.result.problems.append(f"a daemon was replaced without need (fault {number})")
        print(f"\r  {self.result.name} {number}/{self.times} ", end="", file=sys.stderr, flush=True)

    def _give_up(self, job: Job, why: str) -> None:
        """The job is lost: what it had acknowledged is looked for in its last checkpoint."""
        self.result.problems.append(f"after {len(self.result.incidents)} faults: {why}")
        self.result.notes.append(job.story())
        self.result.redone = None
        try:
            job.dlctl("stop")
            self.count(job.judge())
        except (Broken, OSError, AssertionError) as error:
            self.result.problems.append(f"cannot be judged: {error}")

    def judge(self, job: Job) -> None:
        """End the job in order and count what the ledger says. Raises Broken."""
        self._count_refused(job)
        verdict = job.finish()
        self.count(verdict)
        if self.result.redone is not None:
            self.result.redone += max(0, verdict.applied - int(job.run()["step"]))

    def _count_refused(self, job: Job) -> None:
        for name, daemon in job.daemons().items():
            if name.startswith("server"):
                self.result.fenced += int(daemon["metrics"].get("fenced", 0))
                self.result.rejected += int(daemon["metrics"].get("refused", 0))
        exits = [event for event in job.events() if event["kind"] == "exit"]
        self.result.fenced += sum("exit 75" in event["text"] for event in exits)

    def count(self, verdict: ledger.Verdict) -> None:
        """Add what the ledger says of one job."""
        self.result.verdict += verdict
        if verdict.lost:
            self.result.problems.append(f"{verdict.lost} acknowledged pushes are lost")
        if verdict.twice:
            self.result.problems.append(f"{verdict.twice} gradients were applied twice")
        if verdict.strange:
            self.result.problems.append(f"{verdict.strange} cells hold what nobody has sent")
        if not verdict.acknowledged:
            self.result.problems.append("nothing was acknowledged: this shows nothing")


def seconds_to_import_torch() -> float:
    """The median of three, on this machine as it is now."""
    took = []
    for _ in range(IMPORTS):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        took.append(time.monotonic() - began)
    return statistics.median(took)


def try_row(row: Row, times: int, seed: int) -> Result:
    """Do one row. Everything that it started is gone afterwards, also if it is interrupted."""
    result = Result(row.name, row.must, seed, times)
    result.skipped = next((why for need in row.needs if (why := need())), "")
    began = time.monotonic()
    if not result.skipped:
        # A name of its own, so that a row alone makes the choices that it makes among all.
        row.body(Trial(result, random.Random(f"{seed}/{row.name}")))
    result.seconds = time.monotonic() - began
    return result


def spread(values: list[float | None]) -> str:
    """ "median / longest" of what there is."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f} / {max(known):.2f}" if known else "-"
