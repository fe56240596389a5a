"""A later rank of a worker with a training loop of its own:

    python -m daemons.script.later_rank RUN_DIRECTORY NAME INCARNATION RANK FD

Rank 0 starts it (`later_ranks.py`), and FD is where it says how its script has ended.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
from pathlib import Path

from daemons import imports
from daemons.attach import context as attached
from daemons.attach.context import LaterProcess, ProgramEnd
from daemons.parent_death import end_with
from daemons.process import read_job
from daemons.script import later_ranks, machine, program
from daemons.worker.at_exit import end_in_this_thread
from dlctl.launch.base import HOST_FILE


def main() -> None:
    directory, fd = Path(sys.argv[1]), int(sys.argv[5])
    end_with(os.getppid())
    if os.getppid() == 1:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):  # All ranks print to the same pipe.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    job = read_job(directory)
    process = attached.begin_later(job, int(sys.argv[4]))
    is_home = not (directory / HOST_FILE).exists()
    mine = os.getpid()
    machine.use_threads(os.environ)
    imports.quicken()
    end = program.run(job.job, directory if is_home else None)
    is_mine = os.getpid() == mine
    code = _report(process, end, fd) if is_mine else end.code
    end_in_this_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(process: LaterProcess, end: ProgramEnd, fd: int) -> int:
    """Returns the exit code."""
    is_over = process.session is not None and process.session.is_over
    if end.is_error and (is_over or end.detail):
        print(end.detail or end.what, file=sys.stderr)
    later_ranks.tell(fd, later_ranks.Told(end, is_over))
    return end.code if is_over else end.code or 1


if __name__ == "__main__":
    main()
