"""The packages are large, and no part of `make install`: `make integrations` has an environment for
the oldest and for the newest versions, and sets the variable; there nothing is left out.
"""

import os
import sys
from pathlib import Path

import pytest
from fake_run import Attached

import dlctl

sys.path.append(str(Path(__file__).parents[1] / "integ"))  # `workplace`

collect_ignore = (
    []
    if "DLCTL_INTEGRATIONS" in os.environ
    else [
        "test_trainer.py",
        "test_strategy.py",
        "test_runs_of_frameworks.py",
        "test_trackers.py",
    ]
)


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Attached:
    """In place of `dlctl.attach`: gives the run that the test has set."""
    attached = Attached()
    monkeypatch.setattr(dlctl, "attach", attached, raising=False)
    return attached
