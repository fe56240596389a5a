"""The processes of one replica, seen by rank 0, which is the worker itself.

Later ranks are its child processes (`later_rank.py`) and make every engine call together with it.
All ranks share one incarnation and fail together: if a rank exits, the worker exits too, and it is
replaced with all its ranks. When the worker exits, even by SIGKILL, the kernel kills the ranks
(they request this at their start) and their sockets close.

They rendezvous through a store in anonymous memory (memfd), which they inherit. Their group's
traffic stays on the loopback, neither encrypted nor authenticated.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from daemons.log_tail import LINE_CHARS_MAX, LINES
from daemons.template import spares
from daemons.worker.ranks.rank_group import BUILT, MET, RankMessage, join_group, receive, send
from daemons.worker.task.failures import KILLED, ProcessLost, how_it_ended
from dlctl.roles.protocol.effects import TaskFailed
from dlctl.wire.machine import Event
from dlctl.wire.messages import Array

log = logging.getLogger("dlctl")
MEET_S = 30.0
"""Time for all ranks to join their group, once all models are built."""
BLAME_S = 1.0
"""An error in one rank may be caused by the death of another: how long to wait for that news."""
DRAIN_S = 0.5
"""Time to read the last lines of a rank that has exited."""


Call = tuple[Sequence[Array], Mapping[str, Any]]
"""The arrays and the header of a call to a rank."""


class RanksEnded(Exception):
    """A rank has failed, and the failure has been reported."""


class Ranks:
    """All ranks but rank 0. A failure is reported at once, whatever rank 0 does: `fail` gets a
    ProcessLost, `post` what the engine or the task of a rank has raised.
    """

    def __init__(
        self,
        count: int,
        fail: Callable[[Exception], None],
        post: Callable[[Event], None],
        *,
        argv: Sequence[str],
        ready_s: float,
        silent_s: float,
    ) -> None:
        """count: rank 0 included. argv: of each later rank, before its number. ready_s: limit for
        building the models. silent_s: without a heartbeat of a rank whose model is built, after
        which it counts as lost.
        """
        self.count = count
        self.silent_s = silent_s
        self._fail, self._post = fail, post
        self._argv, self._ready_s = argv, ready_s
        self._ranks: list[_Rank] = []
        self._changed = threading.Condition()
        self._is_over = False
        self.store = self.memory = -1
        """Anonymous files (memfd) that all ranks inherit: for their rendezvous, and for the vectors
        that they share."""
        self._begun = 0.0
        self._calls = 0
        self.turn = threading.RLock()  # Held by the thread that makes a call to the ranks.
        self.error = ProcessLost("a rank has failed")  # Why they were ended.

    # ------------------------------------------------------------ from the compute thread

    def start(self, slot: int, term: int) -> None:
        """Start all processes, which then build their models. Raises DlctlError."""
        self.store, self._begun = os.memfd_create("dlctl-ranks", os.MFD_CLOEXEC), time.monotonic()
        self.memory = os.memfd_create("dlctl-replica", os.MFD_CLOEXEC)
        self.order = {"slot": slot, "term": term, "ranks": self.count, "store": self.store,
                      "memory": self.memory}  # fmt: skip
        try:
            for rank in range(1, self.count):
                self._ranks.append(_Rank(self, rank, [*self._argv, str(rank)], self.order))
        except OSError as error:
            raise ProcessLost(f"cannot start rank {rank} of {self.count}: {error}") from error
        for each in self._ranks:
            each.watch()

    def meet(self, device: str = "cpu") -> Any:
        """torch.distributed's group, once all ranks have joined it; device: of its tensors. Raises
        RanksEnded.
        """
        self._await(BUILT, "to build its model", self._begun + self._ready_s)
        deadline = time.monotonic() + MEET_S
        self._send_all("meet", [((), {"limit_s": MEET_S, "device": device})] * len(self._ranks))
        try:
            group = join_group(self.store, 0, self.count, MEET_S, device)
        except Exception as error:
            self.blame()
            self._lose(self._late(MET, "to join the group", f"; {error}"))
        self._await(MET, "to join the group", deadline)
        pids = ", ".join(str(each.process.pid) for each in self._ranks)
        log.info("%d ranks make up this replica; the pids of the others: %s", self.count, pids)
        return group

    def share(self, data: list[Any]) -> None:
        """Return when all ranks use the model in the memory. data: what identifies that of rank 0,
        for the others to compare. Raises RanksEnded.
        """
        self._await(BUILT, "to build its model", self._begun + self._ready_s)
        self._send_all("meet", [((), {"data": data})] * len(self._ranks))
        self._await(MET, "to map the shared model", time.monotonic() + MEET_S)

    def ask(self, rank: int, kind: str, **header: Any) -> None:
        """Have one later rank do something; `result_of` returns its result."""
        each = self._ranks[rank - 1]
        each.message = RankMessage("", {}, ())
        with suppress(OSError):  # The thread that watches the rank reports it.
            send(each.link, kind, **header)

    def result_of(self, rank: int) -> dict[str, Any]:
        """Wait for the result of the newest `ask`. Raises RanksEnded."""
        each = self._ranks[rank - 1]
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or "result" in each.message.header)
            if self._is_over:
                raise RanksEnded
            result: dict[str, Any] = each.message.header["result"]
            return result

    def same(
        self, kind: str, arrays: Sequence[Array] = (), **header: Any
    ) -> AbstractContextManager[list[RankMessage]]:
        """All later ranks make the same call while the block runs."""
        return self.each(kind, [(arrays, header)] * len(self._ranks))

    @contextmanager
    def each(self, kind: str, calls: Sequence[Call]) -> Iterator[list[RankMessage]]:
        """Each later rank makes its own call while the block runs, and has finished it at the
        block's end; then the list has their answers. Raises RanksEnded.
        """
        answers: list[RankMessage] = []
        with self.turn:
            self._calls += 1
            self._send_all(kind, calls)
            try:
                yield answers
            except Exception:
                self.blame()
                raise
            self._await(MET + self._calls, "", None)
            answers += [each.message for each in self._ranks]

    def blame(self) -> None:
        """Rank 0 has failed. Raises RanksEnded if another rank has exited, which is the cause."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, BLAME_S)
        if self._is_over:
            raise RanksEnded

    def end(self) -> None:
        """Kill all ranks and wait for them."""
        with self._changed:
            self._is_over = True
        for each in self._ranks:
            each.process.kill()
        for each in self._ranks:
            each.end()
        for file in (self.store, self.memory):
            if file >= 0:
                os.close(file)
        self.store = self.memory = -1

    def _send_all(self, kind: str, calls: Sequence[Call]) -> None:
        for each, (arrays, header) in zip(self._ranks, calls, strict=True):
            with suppress(OSError):  # The thread that watches the rank reports it.
                send(each.link, kind, arrays, **header)

    def _await(self, step: int, what: str, deadline: float | None) -> None:
        """Wait until all ranks have reached this step; deadline: None if they may compute for
        long.
        """
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())

        def is_done() -> bool:
            return self._is_over or all(each.step >= step for each in self._ranks)

        with self._changed:
            in_time = self._changed.wait_for(is_done, left_s)
        if self._is_over:
            raise RanksEnded
        if not in_time:
            self._lose(self._late(step, what))

    def _late(self, step: int, what: str, more: str = "") -> ProcessLost:
        missing = [str(each.rank) for each in self._ranks if each.step < step] or ["0"]
        took_s = time.monotonic() - self._begun
        late = f"rank {' and '.join(missing)} of {self.count}"
        return ProcessLost(f"{late} took too long {what}: {took_s:.0f} s{more}")

    def _lose(self, error: ProcessLost) -> None:
        self.lost(error)
        raise RanksEnded

    # ------------------------------------------------------------ from the watching threads

    def lost(self, error: ProcessLost) -> None:
        with self._changed:
            is_news, self._is_over = not self._is_over, True
            if is_news:
                self.error = error  # Before anyone who waits can look at it.
            self._changed.notify_all()
        if is_news:
            self._fail(error)

    def failed(self, event: TaskFailed) -> None:
        """Report what the engine or the task of a rank has raised, unless another rank exited."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, BLAME_S)
            is_news, self._is_over = not self._is_over, True
            if is_news:
                self.error = ProcessLost(event.error)
            self._changed.notify_all()
        if is_news:
            self._post(event)

    def came(self, rank: _Rank, message: RankMessage) -> None:
        with self._changed:
            rank.step, rank.message = message.header["step"], message
            self._changed.notify_all()


class _Rank:
    """A later rank, and the threads that watch it."""

    def __init__(
        self, owner: Ranks, rank: int, argv: Sequence[str], order: Mapping[str, Any]
    ) -> None:
        """Start the process of a later rank. Raises OSError."""
        self.rank = rank
        self.step = 0
        self.message = RankMessage("", {}, ())
        """Its message of the newest step."""
        self._owner = owner
        self._last: deque[str] = deque(maxlen=LINES)
        ours, theirs = socket.socketpair()
        self.link = Connection(ours.detach())
        with theirs:
            fd = theirs.fileno()
            self.process = spares.start_rank(
                # -P, as for every daemon: see `launch.base.argv`.
                [sys.executable, "-P", "-m", "daemons.worker.later_rank", *argv, str(fd)],
                pass_fds=(fd, order["store"], order["memory"]),
                is_piped=True,
            )
        send(self.link, "begin", **order)
        self._threads = [
            threading.Thread(target=does, name=f"rank-{rank}", daemon=True)
            for does in (self._read_prints, self._watch)
        ]

    def watch(self) -> None:
        for thread in self._threads:
            thread.start()

    def _read_prints(self) -> None:
        """Copy its output to the worker's log, and remember the last lines."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for raw in lines:
                line = raw.decode(errors="replace").rstrip("\n")
                self._last.append(line[:LINE_CHARS_MAX])
                log.info("%s", line, extra={"stream": "stderr", "rank": self.rank})

    def end(self) -> None:
        """Wait for the killed process and for its threads."""
        self.process.wait()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(DRAIN_S)
        self.link.close()

    def _watch(self) -> None:
        # The socket alone does not do: an orphaned child of the rank may hold it open.
        pidfd = os.pidfd_open(self.process.pid)
        try:
            self._receive(pidfd)
        finally:
            os.close(pidfd)

    def _receive(self, pidfd: int) -> None:
        # No limit before the model is built: an import may block all threads, and the start has its
        # own limit.
        while ready := wait(
            [self.link, pidfd], self._owner.silent_s if self.step >= BUILT else None
        ):
            try:
                if self.link not in ready:
                    raise EOFError
                message = receive(self.link)
            except (EOFError, OSError):
                self._owner.lost(self._how_it_ended())
                return
            if message.kind == "at":
                self._owner.came(self, message)
            elif message.kind == "failed":
                error, detail = message.header["error"], message.header["detail"]
                failed = TaskFailed(f"rank {self.rank}: {error}", detail)
                threading.Thread(target=self._owner.failed, args=(failed,), daemon=True).start()
        silent = f"has sent nothing for {self._owner.silent_s:g} s: it is stopped, or hangs"
        self._owner.lost(ProcessLost(f"{self._named()} {silent}"))

    def _how_it_ended(self) -> ProcessLost:
        self.process.kill()  # If it has only closed its socket.
        status = self.process.wait()
        self._threads[0].join(DRAIN_S)
        how, last = how_it_ended(status), "\n".join(self._last)
        return ProcessLost(f"{self._named()} {how}", last, by_itself=status not in KILLED)

    def _named(self) -> str:
        return f"rank {self.rank} of {self._owner.count} (pid {self.process.pid})"
