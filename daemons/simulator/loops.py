"""Small loops with torch that are no runs, for experiments:
`python -m daemons.simulator.loops NAME`, with a request as JSON on standard input, and the answer
on standard output.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from daemons.imports import without_collections

LOOPS = {name: f"daemons.simulator.{name}" for name in ("delays", "locks", "nopeek")}
"""Name -> the module whose `answer` it is."""


def main(name: str) -> None:
    with without_collections():
        import torch

        answer = import_module(LOOPS[name]).answer
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Standard output is for the answer alone.
    print(json.dumps(answer(json.load(sys.stdin))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
