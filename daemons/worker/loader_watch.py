"""The processes that load the data: when one has ended, that is told at once.

torch looks for it only when no batch has come for the whole limit of one, ten minutes here. A batch
that its process has begun is lost with it, and torch starts no other: the worker is replaced.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from daemons.worker.failures import KILLED, ProcessLost, how_it_ended

BLAME_S = 1.0
"""An error in what a process has sent may be about its end, which is seen a little later."""


class LoaderLost(ProcessLost):
    """A process that loads the data has ended, or sends nothing."""


class LoaderWatch:
    def __init__(
        self, processes: Sequence[BaseProcess], lost: Callable[[LoaderLost], None]
    ) -> None:
        """lost: called in another thread when one of them has ended, unless `close` came first."""
        self.pids = [process.pid for process in processes]
        self._processes = processes
        self._lost = lost
        self._is_over = False
        self._pidfds = {os.pidfd_open(p.pid): p for p in processes if p.pid is not None}
        threading.Thread(target=self._watch, name="loader-watch", daemon=True).start()

    def close(self) -> None:
        """From now on they are meant to end."""
        self._is_over = True

    def blame(self, error: Exception) -> LoaderLost:
        """What an error of torch's comes from, as it waits for them."""
        ended = wait([process.sentinel for process in self._processes], BLAME_S)
        for process in self._processes:
            if process.sentinel in ended:
                process.join()
                return _lost(process.pid, process.exitcode)
        pids = ", ".join(map(str, self.pids))
        return LoaderLost(f"the processes that load the data, pids {pids}, send nothing: {error}")

    def _watch(self) -> None:
        try:
            ended = wait(list(self._pidfds))
            if not self._is_over:
                pidfd = next(fd for fd in self._pidfds if fd in ended)
                process = self._pidfds[pidfd]
                self._lost(_lost(process.pid, _status(pidfd, process)))
        finally:
            for pidfd in self._pidfds:
                os.close(pidfd)


def _status(pidfd: int, process: BaseProcess) -> int | None:
    """How it ended, negative for a signal. It is left to torch to collect, which looks for its end
    when a signal tells of it.
    """
    try:
        end = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return process.exitcode
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _lost(pid: int | None, status: int | None) -> LoaderLost:
    """status: None if that is not known."""
    how = "has ended" if status is None else how_it_ended(status)
    text = f"a process that loads the data, pid {pid}, {how}"
    if status == KILLED[0]:
        text += "; perhaps for want of memory (dmesg says so): lower workers.loader_processes"
    return LoaderLost(text, by_itself=status not in (None, *KILLED))
