"""`make fuzz`: new inputs for a minute, other ones each time.

Prints the seed first, then a line for each target. What breaks something is made shorter, goes into
the corpus, and the command that replays it is printed; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from pathlib import Path

from .runner import CORPUS, Outcome, Target, attempt, keep, minimise, run
from .targets import TARGETS

ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.replay is not None:
        return _replay(arguments.replay, arguments.only)
    unknown = [name for name in arguments.only if name not in TARGETS]
    if unknown:
        print(f"no target is named {', '.join(unknown)}; there are: {' '.join(TARGETS)}")
        return 2
    chosen = [TARGETS[name] for name in arguments.only or TARGETS]
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.time:g} s in all", flush=True)
    failed = [not _fuzz(target, seed, arguments.time / len(chosen)) for target in chosen]
    return 1 if any(failed) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz dlctl.")
    parser.add_argument("--time", type=float, default=60.0, help="seconds, of all targets together")
    parser.add_argument(
        "--only",
        type=lambda text: text.replace(",", " ").split(),
        default=[],
        help=f"some of: {', '.join(TARGETS)}",
    )
    parser.add_argument("--seed", type=int, help="of the random choices; a new one if not given")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try this one input")
    return parser


def _fuzz(target: Target, seed: int, seconds: float) -> bool:
    outcome = run(target, seed, seconds)
    print(_summary(outcome), flush=True)
    if outcome.failure is None:
        return True
    shortest = minimise(target, outcome.failure)
    path = keep(target, shortest)
    print(f"  {_said(shortest.error)}")
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    print(f"  replay: {sys.executable} -m tests.fuzz --replay {shown}")
    return False


def _summary(outcome: Outcome) -> str:
    rate = outcome.cases / max(outcome.seconds, 1e-9)
    verdict = "good" if outcome.failure is None else "BROKEN"
    return f"{outcome.target:<10}  {outcome.cases:>8,} cases  {rate:>7,.0f} per s  {verdict}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]!a}"


def _replay(path: Path, only: list[str]) -> int:
    """The targets named by --only; else the one whose corpus the file is in."""
    path = path.absolute()
    names = only or [path.parent.name]
    if not path.is_file() or any(name not in TARGETS for name in names):
        print(f"--replay wants a file in {CORPUS}, or one elsewhere and --only TARGET")
        return 2
    failures = [attempt(TARGETS[name], path.read_bytes()) for name in names]
    for failure in filter(None, failures):
        traceback.print_exception(failure.error)
    print("BROKEN" if any(failures) else "good")
    return 1 if any(failures) else 0


if __name__ == "__main__":
    sys.exit(main())
