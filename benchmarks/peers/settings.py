"""The command-line argument of the programs of this folder, as JSON."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import signal
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

PR_SET_PDEATHSIG = 1
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # or it writes a token to the home directory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    work: str
    """A name in `work.WORKS`."""
    workers: int
    batch_size: int
    """Samples per step of one worker."""
    lr: float
    seed: int
    """Of the order of the samples; the initial values are always the same."""
    target: float
    """Accuracy on the test set at which training may stop."""
    budget_s: float
    """Seconds of training after which it gives up."""
    snapshots: str
    """The file that `watch.Watch` writes."""
    rank: int = 0
    """Of this process; a server is rank 0, its workers are 1, 2 ..."""
    port: int = 0
    """Of the rendezvous."""
    address: str = "127.0.0.1"
    """Of rank 0."""
    options: dict[str, Any] = field(default_factory=dict)
    """Specific to this peer."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def why_not_there(package: str) -> str:
    """ "" if the package is installed, or none is needed."""
    return "" if not package or find_spec(package) else f"{package} is not installed"


def from_command_line() -> Settings:
    """Raises SystemExit with a usage text. From then on SIGTERM raises SystemExit, too.

    The kernel sends SIGTERM when the parent of this process is killed.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {__package__}.NAME '{{\"work\": ...}}' (see settings.py)")
    return Settings(**json.loads(sys.argv[1]))
