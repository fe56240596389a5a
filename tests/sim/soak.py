"""Many more seeds than a test run has time for: `make soak SEEDS=100000 TIME=3600`.

Uses all cores, shows how far it is, and ends with every failing seed's replay command; exits 1 if
there is one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

from scenarios import SCENARIOS
from seeds import Result, Summary, run_seed

_PR_SET_PDEATHSIG = 1
BLOCK = 25
"""Seeds that a process runs before it reports."""
SHOW_S = 10.0
"""Between two lines that say how far it is."""


def pool() -> ProcessPoolExecutor:
    """One process per core. They are fresh ones, so that nothing of the parent is in them."""
    return ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("spawn"), initializer=_end_with_parent
    )


def _end_with_parent() -> None:
    """Otherwise they would wait for work for ever if the parent was killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_block(scenario: str, seeds: range) -> list[Result]:
    return [run_seed(scenario, seed) for seed in seeds]


def explore(
    executor: ProcessPoolExecutor, scenarios: list[str], seeds: range, time_s: float
) -> Iterator[Result]:
    """Every seed of every scenario, in order of their ends; nothing new is begun after `time_s`."""
    until = time.monotonic() + time_s
    blocks = [range(first, min(first + BLOCK, seeds.stop)) for first in seeds[::BLOCK]]
    jobs = iter([(name, block) for block in blocks for name in scenarios])
    waiting: list[Future[list[Result]]] = []
    for _ in range(2 * (os.cpu_count() or 1)):
        waiting += [executor.submit(run_block, *job) for job in [next(jobs, None)] if job]
    while waiting:
        yield from waiting.pop(0).result()
        job = next(jobs, None) if time.monotonic() < until else None
        waiting += [executor.submit(run_block, *job)] if job else []


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
