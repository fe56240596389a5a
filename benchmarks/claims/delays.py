"""Dai et al. 2018, their figure: rounds to a target with delays, relative to none, for networks of
several depths and optimisers; and gradient coherence. `python -m benchmarks.claims.delays`

Cells that are done are kept in `benchmarks/results/delays.json`, so it may be interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dlctl.ops import claims
from dlctl.study.claims import staleness_depth

RESULTS = Path(__file__).parents[1] / "results" / "delays.json"
OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "rmsprop")
DEPTHS = (3, 1, 0, 2)
DELAYS = (0, 4, 8, 16, 32)
COHERENCE_DELAY = 8


def main(cells_max: int) -> None:
    """cells_max: how many to compute now."""
    done: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with claims.lab(5, 1) as lab:
        lab.place("digits")
        for name in (f"{optimizer}-{depth}" for depth in DEPTHS for optimizer in OPTIMIZERS):
            if name in done or cells_max <= 0:
                continue
            optimizer, _, depth = name.partition("-")
            answer = lab.loop(
                "delays",
                {
                    "optimizer": optimizer, "hidden": int(depth), "delays": DELAYS,
                    "workers": staleness_depth.WORKERS, "rounds": staleness_depth.ROUNDS,
                    "times_max": staleness_depth.TIMES_MAX, "seeds": [*lab.seeds],
                    "coherence": COHERENCE_DELAY,
                },
            )  # fmt: skip
            done[name] = answer
            RESULTS.write_text(json.dumps(done, indent=1) + "\n")
            print(name, answer, file=sys.stderr, flush=True)
            cells_max -= 1


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else len(OPTIMIZERS) * len(DEPTHS))
