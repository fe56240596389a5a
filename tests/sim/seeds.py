"""Run many seeds of a scenario; every failure has its replay command."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from scenarios import LIMIT_S, SCENARIOS

from dlctl.roles.coordinator.supervision.groups import LOST
from dlctl.sim.checkers import LivenessChecker, PromiseBroken
from dlctl.sim.checkers.saved import IN_ORDER
from dlctl.sim.disk import NO_SPACE
from dlctl.sim.simulation import Outcome, Simulation

PER_COMMIT = {
    "downpour": 2, "downpour-topk": 1, "sync": 1, "backups": 1, "target-batch": 1, "local-sgd": 1,
    "ways": 1, "sandblaster": 1, "recovery": 2, "commits": 2, "sync-recovery": 1, "full-disks": 1,
    "stops": 1, "streams": 1, "toys": 3, "serverless": 1, "liars": 1, "stolen-keys": 1,
    "loops": 1, "joins": 1, "split": 1, "preempted": 1, "recuts": 1,
    "stale-gradients": 1,
}  # fmt: skip
"""Scenario -> how many of it: those that take longer come less often. `make soak` takes 2,000."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one seed."""

    scenario: str
    seed: int
    error: str
    """What was found, or "" if every promise was kept."""
    found_by: str
    """The checker's name, or the kind of exception."""
    digest: str
    pushes: int
    faults: int
    """Those that met somebody, without lost and repeated messages."""
    had_room: bool = True
    """False: `found_no_room`."""

    @property
    def replay(self) -> str:
        """One command that shows exactly this run."""
        return f"python tests/sim/replay.py {self.scenario} {self.seed}"


def finish(simulation: Simulation) -> Outcome:
    """Run to the end. Raises PromiseBroken, or whatever a role raises; also if there is no end."""
    outcome = simulation.run(LIMIT_S)
    world = outcome.world
    if not world.over():
        waits = next(c for c in simulation.checkers if isinstance(c, LivenessChecker))
        raise waits.broken(
            f"not over after {LIMIT_S:.0f} s: {waits.waiting_daemons(world.timeline.now)}"
        )
    may_fail = found_no_room(outcome) or outcome.reason == LOST  # `GroupChecker` looks at these.
    if outcome.state not in IN_ORDER and not may_fail:
        raise PromiseBroken("Outcome", f"the run is {outcome.state}: {outcome.reason}")
    return outcome


def found_no_room(outcome: Outcome) -> bool:
    """Whether it has ended because the disk was full when its shards were to be written there for
    the first time. It does not wait for that: it has nothing to lose, and its user is looking on.

    If its coordinator died in between, the next one may know no more than that a server is gone.
    """
    world = outcome.world
    has_begun = outcome.state == "finished" or world.network.messages["Push"] > 0
    return not has_begun and any(line.endswith(f" error: {NO_SPACE}") for line in world.trace)


def examine(scenario: str, seed: int) -> tuple[Result, list[str]]:
    """What became of a seed, and its trace."""
    simulation = SCENARIOS[scenario](seed)
    error, found_by, had_room = "", "", True
    try:
        had_room = not found_no_room(finish(simulation))
    except Exception as caught:  # A role may fail in any way: that is what is looked for.
        found_by = caught.checker if isinstance(caught, PromiseBroken) else type(caught).__name__
        error = str(caught) or repr(caught)
    world = simulation.world
    result = Result(
        scenario, seed, error, found_by, world.digest(), world.network.messages["Push"],
        simulation.injector.struck.total() + world.crash_points.crashes, had_room,
    )  # fmt: skip
    return result, world.trace


def run_seed(scenario: str, seed: int) -> Result:
    return examine(scenario, seed)[0]


@dataclass(slots=True)
class Summary:
    """Of many seeds."""

    seconds: float = 0.0
    runs: Counter[str] = field(default_factory=Counter)
    """Scenario -> seeds that were run."""
    pushes: int = 0
    faults: int = 0
    fewest_pushes: int = 10**9
    fewest_faults: int = 10**9
    without_room: int = 0
    """Runs that ended before they had begun."""
    failures: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.runs[result.scenario] += 1
        self.pushes += result.pushes
        self.faults += result.faults
        if result.error:
            self.failures.append(result)
            return
        if not result.had_room:
            self.without_room += 1
            return
        self.fewest_pushes = min(self.fewest_pushes, result.pushes)
        self.fewest_faults = min(self.fewest_faults, result.faults)

    def __str__(self) -> str:
        total = self.runs.total()
        runs = ", ".join(f"{name} {count}" for name, count in sorted(self.runs.items()))
        lines = [
            f"{total} seeds in {self.seconds:.0f} s ({runs})",
            f"per seed {self.pushes / total:.0f} pushes (at least {self.fewest_pushes}) and "
            f"{self.faults / total:.1f} faults (at least {self.fewest_faults})",
            f"{self.without_room} found no room for their shards when they began",
            f"{len(self.failures)} failed",
        ]
        for failure in self.failures:
            lines += [f"  {failure.replay}", f"    {failure.error:.300}"]
        return "\n".join(lines)


def summarise(scenario: str, seeds: range) -> Summary:
    """Run them one after the other."""
    begun = time.monotonic()
    summary = Summary()
    for seed in seeds:
        summary.add(run_seed(scenario, seed))
    summary.seconds = time.monotonic() - begun
    return summary
