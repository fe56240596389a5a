"""What a deliberate bug is, and how one is planted into all daemons of a run and hunted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from scenarios import SCENARIOS
from seeds import Result, run_seed

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutant:
    bug: str
    """In one sentence: what the daemons do wrong."""
    plant: Callable[[Patch], None]
    caught_by: tuple[str, ...]
    scenario: str
    seeds: int
    first: int
    """The seed to begin with: one that finds it, so that all bugs are found in seconds."""

    def hunt(self) -> Result | None:
        """The first seed that finds it, if one of `seeds` does."""
        SCENARIOS[self.scenario](self.first)  # What it is compared with is of sound code.
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            seeds = range(self.first, self.first + self.seeds)
            results = (run_seed(self.scenario, seed) for seed in seeds)
            return next((result for result in results if result.error), None)


MUTANTS: dict[str, Mutant] = {}


def mutant(
    bug: str, *caught_by: str, scenario: str = "downpour", seeds: int = 10, first: int = 0
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enter a function that plants a bug into the list, under its name."""

    def enter(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[plant.__name__.replace("_", "-")] = Mutant(
            bug, plant, caught_by, scenario, seeds, first
        )
        return plant

    return enter
