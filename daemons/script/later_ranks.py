"""The processes of a worker whose replica is several of them (`[workers] processes`), seen by rank
0, which is the worker itself.

All run the same script, and start and end together. When rank 0 ends, even by SIGKILL, the kernel
ends the others. When another one ends before the run is over, rank 0 says so and ends: its agent
starts all of them again. A later rank tells rank 0 why its script has ended.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from daemons.attach.context import ProgramEnd, ScriptProcess
from daemons.process import in_words
from daemons.script import rank_environment
from daemons.template import spares
from daemons.worker.task.failures import ProcessLost, how_it_ended
from dlctl.roles.protocol.effects import TaskFailed

log = logging.getLogger("dlctl")
BLAME_S = 1.0
"""An error in one rank may be caused by the end of another: how long to wait for that news."""
STORE_S = 300.0
"""For an operation of the store by which the ranks find each other."""
TOLD_BYTES = 1 << 16
"""Of what a rank says about its end."""


class Told(NamedTuple):
    """What a rank says of the end of its script."""

    end: ProgramEnd
    is_over: bool
    """The run was over for it."""


class LaterRanks:
    """All ranks but 0."""

    def __init__(
        self, count: int, script: ScriptProcess, fail: Callable[[TaskFailed], int]
    ) -> None:
        """Set the environment of rank 0, and start the others. fail: tells the run of a failure;
        returns the exit code. Raises OSError.
        """
        self.count = count
        self._script, self._fail = script, fail
        self._changed = threading.Condition()
        self._ended: dict[int, int] = {}
        """Rank -> exit status."""
        self._is_over = self._is_failing = False
        self._listener = socket.create_server((rank_environment.HOST, 0))
        port = self._listener.getsockname()[1]
        me = script.context.registration
        run = f"{me.name}-{me.incarnation}"
        rank_environment.begin(os.environ, count, port, run)
        self._ranks = [_LaterRank(rank, script) for rank in range(1, count)]
        self._store = self._open_store(port)
        for rank in self._ranks:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()
        pids = ", ".join(str(rank.process.pid) for rank in self._ranks)
        log.info("%d processes make up this replica; the pids of the others: %s", count, pids)

    def _open_store(self, port: int) -> Any:
        """For torch.distributed.init_process_group. It listens on the loopback only."""
        import torch.distributed

        dist: Any = torch.distributed  # Its types lack the stores.
        return dist.TCPStore(
            rank_environment.HOST, port, None, True, timedelta(seconds=STORE_S),
            wait_for_workers=False, master_listen_fd=self._listener.detach(),
        )  # fmt: skip

    # ------------------------------------------------------------ in the main thread

    def own_end(self, end: ProgramEnd) -> None:
        """The script has ended in this process. Does not return if another rank's is to blame."""
        with self._changed:
            if end.is_error and not self._is_run_over():
                self._changed.wait_for(lambda: self._is_failing, BLAME_S)
            is_failing = self._is_failing
            self._is_over = not is_failing
        if is_failing:
            threading.Event().wait()  # Another thread ends this process.

    def finish(self, code: int, within_s: float) -> int:
        """Wait until the scripts have ended in all ranks. Returns the exit code of the worker."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ended) == len(self._ranks), within_s)
            ended = dict(self._ended)
        for rank in self._ranks:
            if rank.number not in ended:
                log.warning("rank %d did not end within %g s", rank.number, within_s)
                rank.process.kill()
            elif ended[rank.number]:
                log.error("rank %d %s", rank.number, how_it_ended(ended[rank.number]))
                code = code or 1
        return code

    # ------------------------------------------------------------ in the watching threads

    def _watch(self, rank: _LaterRank) -> None:
        status = rank.process.wait()
        told = rank.told()
        is_regular = told is not None and told.is_over
        with self._changed:
            self._ended[rank.number] = status
            is_expected = is_regular or self._is_over or self._is_run_over()
            is_mine = not (is_expected or self._is_failing)
            self._is_failing |= is_mine
            self._changed.notify_all()
        if is_mine:
            self._end(rank, status, None if told is None else told.end)

    def _is_run_over(self) -> bool:
        session = self._script.session
        return session is not None and session.is_over

    def _end(self, rank: _LaterRank, status: int, told: ProgramEnd | None) -> None:
        named = f"rank {rank.number} of {self.count}"
        if told is None:
            how = how_it_ended(status)
            lost = ProcessLost(f"{named} (pid {rank.process.pid}) {how}", by_itself=status >= 0)
            log.error("%s; all processes of this worker end", in_words(lost))
            code = lost.exit_code
        else:
            told = told._replace(what=f"{named}: {told.what}")
            hint = "let `for batch in run.loader(...)` or `while not run.ended` end the training"
            code = self._fail(told.failure("before the run was over", told.hint or hint))
        logging.shutdown()
        os._exit(code)


class _LaterRank:
    def __init__(self, number: int, script: ScriptProcess) -> None:
        """Start it. Raises OSError."""
        self.number = number
        context = script.context
        me = context.registration
        self._told, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        environment = dict(os.environ)
        rank_environment.be(environment, number)
        try:
            self.process = spares.start_rank(
                # -P, as for every daemon: see `launch.base.argv`.
                [
                    sys.executable, "-P", "-m", "daemons.script.later_rank",
                    str(context.directory), me.name, str(me.incarnation), str(number), str(theirs),
                ],
                pass_fds=(theirs,), environment=environment,
            )  # fmt: skip
        finally:
            os.close(theirs)

    def told(self) -> Told | None:
        """None: the process has ended without a word."""
        try:
            said = os.read(self._told, TOLD_BYTES)
            end, is_over = json.loads(said)
            return Told(ProgramEnd(**end), is_over)
        except (BlockingIOError, ValueError, TypeError):
            return None
        finally:
            os.close(self._told)


def tell(fd: int, told: Told) -> None:
    """In the later rank, before it ends."""
    short = told.end._replace(what=told.end.what[:2000], detail=told.end.detail[-8000:])
    os.write(fd, json.dumps([short._asdict(), told.is_over]).encode())
