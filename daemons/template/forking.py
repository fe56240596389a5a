"""What makes a forked process one of its own."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys

MODULE = 3
"""The place of the module in a daemon's command line (`dlctl.launch.base.argv`)."""


def draw_other_numbers() -> None:
    """Seed all generators from the machine, as a new process does. Python's `random` does so on its
    own; the generators of GPUs do not exist yet.
    """
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def run(argv: list[str]) -> None:
    """Run the module of this command line, as Python does."""
    module = argv[MODULE]
    sys.argv = [module, *argv[MODULE + 1 :]]
    sys.orig_argv[:] = argv
    runpy.run_module(module, run_name="__main__", alter_sys=True)
