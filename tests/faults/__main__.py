"""`make faults`: the table. ONLY, TIMES, SEED and OUT come from the environment."""

from __future__ import annotations

import fnmatch
import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType

from tests.hosts.rootless import become_root

from . import (  # noqa: F401 - they register their rows
    on_clock,
    on_control,
    on_disk,
    on_files,
    on_network,
    on_parties,
    on_servers,
    on_strangers,
    on_workers,
)
from .job import sweep
from .rows import ROWS, Result, Row, seconds_to_import_torch, spread, try_row

HEADS = (
    "FAULT", "TIMES", "ACKED", "LOST", "TWICE", "FENCED", "REJECTED", "REDONE", "DETECT s",
    "RESUME s", "GAP s", "FALSE", "TOOK", "VERDICT",
)  # fmt: skip


def chosen(only: str) -> list[Row]:
    """The rows that ONLY names; all if it is empty."""
    patterns = [pattern for pattern in only.replace(",", " ").split() if pattern] or ["*"]
    unknown = [p for p in patterns if not fnmatch.filter(ROWS, p)]
    if unknown:
        sys.exit(f"no row is named {', '.join(unknown)}; there are: {' '.join(ROWS)}")
    return [r for r in ROWS.values() if any(fnmatch.fnmatch(r.name, p) for p in patterns)]


def cells(result: Result) -> list[str]:
    if result.skipped:
        return [result.name, *["-"] * (len(HEADS) - 2), f"skipped: {result.skipped}"]
    verdict, incidents = result.verdict, result.incidents
    return [
        result.name,
        str(len(incidents)),
        str(verdict.acknowledged),
        str(verdict.lost),
        str(verdict.twice),
        str(result.fenced),
        str(result.rejected),
        "-" if result.redone is None else str(result.redone),
        spread([i.detect_s for i in incidents]),
        spread([i.resume_s for i in incidents]),
        spread([i.others_gap_s for i in incidents]),
        str(sum(i.false_failovers for i in incidents)),
        f"{result.seconds:.0f}",
        "good" if result.is_good else "BAD",
    ]


def table(results: list[Result]) -> str:
    """Times are "median / longest"; a gap is how long somebody else stood still."""
    rows = [list(HEADS), *(cells(result) for result in results)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(HEADS) - 1)]
    return "\n".join(
        "  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[-1]]) for r in rows
    )


def details(result: Result) -> str:
    lines = [f"{result.name} must: {result.must}"]
    lines += [f"  - {problem}" for problem in result.problems]
    return "\n".join([*lines, *result.notes])


def end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    if len(sys.argv) > 1:
        print(f"{__doc__}rows: {' '.join(ROWS)}")
        return 2
    become_root("tests.faults", ())
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if a shell had it ignored
    rows = chosen(os.environ.get("ONLY", ""))
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(10**6))
    for left in sweep():
        print(f"removed what a harness that was killed had left: {left}", flush=True)
    results: list[Result] = []
    try:
        try_all(rows, seed, results)
    except KeyboardInterrupt:
        print(f"\n{table(results)}")
        print(f"interrupted; everything that was started has been ended; SEED={seed}")
        return 130
    finally:
        write(os.environ.get("OUT", ""), seed, results)
    return conclude(results, seed)


def try_all(rows: list[Row], seed: int, results: list[Result]) -> None:
    """Do the rows one after the other; each is shown when it is done."""
    print(f"SEED={seed}; import torch takes {seconds_to_import_torch():.2f} s here", flush=True)
    for row in rows:
        times = int(os.environ.get("TIMES") or row.times)
        results.append(try_row(row, times, seed))
        print("\r", end="", file=sys.stderr)
        print("  ".join(cells(results[-1])), flush=True)
        if results[-1].is_good and results[-1].notes:
            print("\n".join(results[-1].notes), flush=True)


def conclude(results: list[Result], seed: int) -> int:
    """Print the whole table and what is bad; returns the exit code."""
    print(f"\n{table(results)}\n")
    bad = [r for r in results if not r.is_good and not r.skipped]
    skipped = [r for r in results if r.skipped]
    for result in bad:
        print(details(result))
    print(f"{len(results)} rows: {len(bad)} bad, {len(skipped)} skipped; SEED={seed}")
    return 1 if bad else 0


def write(out: str, seed: int, results: list[Result]) -> None:
    if out:
        rows = [result.to_json() for result in results]
        content = {"seed": seed, "rows": rows}
        Path(out).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
