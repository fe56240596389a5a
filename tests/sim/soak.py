"""Many more seeds than a test run has time for: `make soak SEEDS=100000 TIME=3600`.

Uses all cores, shows how far it is, and ends with every failing seed's replay command; exits 1 if
there is one.
"""

from __future__ import annotations

import argparse
import sys
import time

from scenarios import SCENARIOS
from seeds import Summary, explore, pool

SHOW_S = 10.0
"""Between two lines that say how far it is."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run many seeds of all scenarios.")
    parser.add_argument("--seeds", type=int, default=2000, help="in all, over all scenarios")
    parser.add_argument("--first", type=int, default=0, help="number of the first seed")
    parser.add_argument("--time", type=float, default=86_400, help="seconds; then it ends")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="may be repeated")
    arguments = parser.parse_args()
    names = arguments.scenario or list(SCENARIOS)
    seeds = range(arguments.first, arguments.first + -(-arguments.seeds // len(names)))
    summary, begun, shown = Summary(), time.monotonic(), 0.0
    print(f"seeds {seeds.start}..{seeds.stop - 1} of {', '.join(names)}", flush=True)
    with pool() as executor:
        for result in explore(executor, names, seeds, arguments.time):
            summary.add(result)
            summary.seconds = time.monotonic() - begun
            if result.error:
                print(f"{result.replay}\n  {result.error:.300}", flush=True)
            if summary.seconds - shown >= SHOW_S:
                shown = summary.seconds
                total = len(seeds) * len(names)
                print(f"{summary.runs.total()} of {total} in {shown:.0f} s", flush=True)
    print(summary)
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
