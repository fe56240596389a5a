"""The mutation gate: a simulator that misses a deliberate bug is not looking."""

import pytest
from mutants import MUTANTS

from dlctl.sim import checkers


@pytest.mark.per_commit("checker")
@pytest.mark.parametrize(
    ("checker", "scenario", "name"),
    [(mutant.caught_by[0], mutant.scenario, name) for name, mutant in MUTANTS.items()],
)
def test_a_deliberate_bug_is_caught_within_its_seeds(checker, scenario, name):
    """For every commit one bug of each checker. Without the bug `make soak` runs the same seeds."""
    mutant = MUTANTS[name]
    result = mutant.hunt()
    assert result is not None, f"{mutant.bug}: it has survived {mutant.seeds} seeds"
    shown = f"{result.replay} --mutant {name}\n{result.error}"
    assert result.found_by in mutant.caught_by, f"caught by chance, see {shown}"


def test_every_checker_has_a_bug_that_only_it_is_there_for():
    kinds = (getattr(checkers, name) for name in checkers.__all__)
    names = {kind.__name__ for kind in kinds if issubclass(kind, checkers.Checker)}
    alone = {
        name
        for mutant in MUTANTS.values()
        if len(mutant.caught_by) == 1
        for name in mutant.caught_by
    }
    assert names - {"Checker"} <= alone
