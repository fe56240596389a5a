"""Simulate runs: `python -m daemons.simulator SLOTS`, with a request per line of standard input.

A request is JSON of `dlctl.sim.request`. Its answer is a line of JSON: {"directory", "simulated"},
or {"directory", "error"}. Up to SLOTS of them run at the same time, each in a process of its own
that is forked from this one: torch is imported once, and no task sees what another one has left.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import traceback

from daemons.imports import without_collections

with without_collections():
    from daemons.parent_death import end_with
    from daemons.simulator.simulate import answer


def main(slots: int) -> None:
    # The tasks may print and read: standard input and output are for requests and answers. A forked
    # process closes `sys.stdin`, which would wait for the thread that reads the next request.
    requests, sys.stdin = sys.stdin, None
    answers = os.fdopen(os.dup(1), "w")
    end_with(os.getppid())
    os.dup2(2, 1)
    gc.freeze()  # A collection would write to, and so copy, what the processes share.
    pool = multiprocessing.get_context("fork").Pool(
        slots, end_with, (os.getpid(),), maxtasksperchild=1
    )
    code = 1
    try:
        for line in pool.imap_unordered(answer, requests):
            print(json.dumps(line), file=answers, flush=True)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        # The pool's processes end with the thread that has forked them: to end that first, as the
        # pool would, may leave its lock with a dead one, and wait for it for ever.
        os._exit(code)


main(int(sys.argv[1]))
