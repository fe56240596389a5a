"""Time until an accuracy is reached on one machine: dlctl and the alternatives.

Fashion-MNIST, a network of 235,146 parameters, four workers with one thread and batches of 32, and
a test accuracy of 0.85. For all of them the clock starts when all processes are ready.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.peers.contest import against, compete, figures_of, from_start_against
from benchmarks.peers.places import loopback
from benchmarks.peers.settings import Settings
from benchmarks.peers.table import DDP, FAST, HOGWILD, RPC, diloco

CHAPTER = "train"
ROUNDS = 3
BUDGET_S = 60.0
ASKED = {diloco(8).name: 1.0, HOGWILD.name: 1.5, DDP.name: 0.333, RPC.name: 0.333}
FROM_START_ASKED = 0.8
WORKERS = 4
TARGET = 0.85
OURS = FAST[0].name


def settings_for(directory: Path, *, quick: bool, budget_s: float = BUDGET_S) -> Settings:
    """A quick run trains a smaller network on 1,437 digits."""
    return Settings(
        work="digits" if quick else "fashion", workers=2 if quick else WORKERS, batch_size=32,
        lr=0.0, seed=0, target=TARGET, budget_s=budget_s, snapshots=str(directory / "copies.npz"),
    )  # fmt: skip


def measure(*, quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="dlctl-peers-") as name:
        settings = settings_for(Path(name), quick=quick)
        with loopback(settings.workers) as place:
            tries = compete(FAST, place, settings, 1 if quick else ROUNDS)
    what = f"to accuracy {TARGET}"
    return [
        *figures_of(CHAPTER, what, tries),
        *(against(CHAPTER, OURS, other, tries, asked) for other, asked in ASKED.items()),
        from_start_against(CHAPTER, OURS, diloco(8).name, tries, FROM_START_ASKED),
    ]
