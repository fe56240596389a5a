"""Replay one seed of one scenario, with its trace: what a failing seed's command runs.

    python tests/sim/replay.py downpour 1234
    python tests/sim/replay.py downpour 1234 --quiet
    python tests/sim/replay.py sync 7 --mutant barrier-waits-for-the-dead

Equal seeds print equal bytes, on every machine and in every process.
"""

from __future__ import annotations

import argparse
import sys

import pytest
from mutants import MUTANTS
from scenarios import SCENARIOS
from seeds import examine


def main() -> int:
    """Prints the trace, then what was found; exits 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description="Replay one seed of one scenario.")
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--quiet", action="store_true", help="leave the trace out")
    parser.add_argument("--mutant", choices=MUTANTS, help="switch on a deliberate bug")
    arguments = parser.parse_args()
    with pytest.MonkeyPatch.context() as patch:
        if arguments.mutant:
            MUTANTS[arguments.mutant].plant(patch)
        result, trace = examine(arguments.scenario, arguments.seed)
    if not arguments.quiet:
        print("\n".join(trace))
    print(f"trace {result.digest}, {result.pushes} pushes, {result.faults} faults")
    print(result.error or "every promise was kept")
    return 1 if result.error else 0


if __name__ == "__main__":
    sys.exit(main())
