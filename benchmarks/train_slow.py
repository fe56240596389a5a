"""The same as `train`, with every worker behind its own link: 100 Mbit/s, 5 ms one way.

Servers and coordinators are where all the links meet.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.peers.contest import Tries, against, bytes_against, compete, figures_of
from benchmarks.peers.places import links, why_no_links
from benchmarks.peers.table import DDP, DDP_FP16, RPC, SLOW, diloco, powersgd
from benchmarks.train import TARGET, settings_for

CHAPTER = "train_slow"
ROUNDS = 3
BUDGET_S = 600.0
MBIT_PER_S, DELAY_MS = 100.0, 5.0
ONCE = [DDP.name, DDP_FP16.name, RPC.name, powersgd(4).name]
"""They take minutes each, so they run in the first round only."""
OURS = SLOW[0].name
ASKED = {DDP.name: 0.05, diloco(64).name: 1.0}
BYTES_ASKED = 0.05


def measure(*, quick: bool) -> list[Figure]:
    what = f"to accuracy {TARGET} at {MBIT_PER_S:g} Mbit/s"
    if why := why_no_links():
        return figures_of(CHAPTER, what, {peer.name: Tries(why_not=why) for peer in SLOW})
    with tempfile.TemporaryDirectory(prefix="dlctl-peers-") as name:
        settings = settings_for(Path(name), quick=quick, budget_s=BUDGET_S)
        with links(settings.workers, MBIT_PER_S, DELAY_MS, Path(name)) as place:
            tries = compete(SLOW, place, settings, 1 if quick else ROUNDS, ONCE)
    return [
        *figures_of(CHAPTER, what, tries),
        *(against(CHAPTER, OURS, other, tries, asked) for other, asked in ASKED.items()),
        bytes_against(CHAPTER, OURS, DDP.name, tries, BYTES_ASKED),
    ]
