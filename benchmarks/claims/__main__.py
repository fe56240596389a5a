"""`python -m benchmarks.claims [NAME...]`: run the claims that have no record yet, and those named;
print all outcomes, and write the page of the documents.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from dlctl.cli.commands.claims import middle
from dlctl.ops import claims
from dlctl.study.claims import CLAIMS

RESULTS = Path(__file__).parents[1] / "results" / "claims"
PAGE = Path(__file__).parents[2] / "docs" / "claims.py"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", type=_name)
    parser.add_argument("--slots", type=int, default=1, help="simulations at a time")
    options = parser.parse_args(arguments)
    for name in CLAIMS:
        file = RESULTS / f"{name}.json"
        if name in options.names or not file.exists():
            print(f"{name} runs ...", file=sys.stderr, flush=True)
            record = claims.run(name, options.slots)
            file.write_text(json.dumps(record, indent=1) + "\n")
    for name in CLAIMS:
        record = claims.read(RESULTS / f"{name}.json")
        print(f"{name}: {record['outcome']} ({record['made_at']}, {record['seeds']} seeds)")
        for part, found in record["parts"].items():
            print(f"    {part}: {found}, by {middle(record['margins'][part])}")
    subprocess.run([sys.executable, str(PAGE)], check=True)


def _name(text: str) -> str:
    if text not in CLAIMS:
        raise argparse.ArgumentTypeError(f'no claim "{text}"; there are {", ".join(CLAIMS)}')
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
