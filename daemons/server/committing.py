"""Performs the commits of a server in a thread: one sync for all that were begun during the last.

    loop     push, push, push ...  | Commit 7, 8, 9 are queued  | Committed(9): the acks leave
    thread   sync of 6             | sync of 7, 8, 9            | ...

The loop applies pushes meanwhile. Each commit is confirmed in its order. If one fails, the server
ends with its error: none that follows is written, and nothing that waits for it has left.

What is queued is bounded, records and bases apart: beyond that the next message of a worker is not
received, in the same turn of the loop, until the thread has caught up. So workers wait for their
acks, as they would for a slower server. A base may be larger than any bound for records; one of
each log may be queued, and does not keep the server from reading.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from itertools import islice

from daemons.loop import Loop
from dlctl.errors import TimedOut
from dlctl.roles.server.commits import Commit, Committed
from dlctl.shards.log import perform_first

QUEUED_MAX = 64 << 20
"""Bytes of records. Those of one more message come on top."""
AWAIT_S = 5.0
"""For the commits under way, while the loop stands still: well below `silent_s`, after which the
server would be taken for dead."""
TOGETHER_MAX = 1024
"""Commits that one sync covers at most."""


class Committing:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._queue: deque[Commit] = deque()
        """Commits that are not durable, the first of them being written."""
        self._queued_bytes = 0
        """Size of the records of these commits."""
        self._bases = Counter[int]()
        """The number of their bases, by the identity of the log."""
        self._has_failed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        loop.perform(Commit, self._begin)
        loop.after_events = self._read_or_wait

    # ------------------------------------------------------------ in the loop

    def _begin(self, commit: Commit) -> None:
        if self._thread is None:  # Most servers never need one.
            self._thread = threading.Thread(target=self._work, name="commits", daemon=True)
            self._thread.start()
        with self._changed:
            if self._has_failed:
                return
            self._queue.append(commit)
            self._queued_bytes += len(commit.write.record)
            self._bases[id(commit.write.log)] += bool(commit.write.base)
            self._changed.notify_all()
        if not self._has_room():
            self._loop.transport.accept(False)

    def await_all(self) -> None:
        """Return when no commit is under way, or the server is about to end with the error of one.
        Raises TimedOut, naming the first that is late.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._has_failed or not self._queue, AWAIT_S):
                return
            late = self._queue[0]
        where = late.write.log.where
        raise TimedOut(
            f"commit {late.number} is not on the disk after {AWAIT_S:g} s",
            where=where,
            hint=f"see why with dmesg; findmnt -T {where}",
        )

    def _read_or_wait(self) -> None:
        """Before the loop waits for messages again."""
        self._loop.transport.accept(self._has_room())

    def _has_room(self) -> bool:
        with self._changed:
            return self._queued_bytes <= QUEUED_MAX and max(self._bases.values(), default=0) <= 1

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        try:
            while True:
                with self._changed:  # For work, as long as there is none.
                    self._changed.wait_for(lambda: self._queue)
                    commits = list(islice(self._queue, TOGETHER_MAX))
                count = perform_first([commit.write for commit in commits])
                self._confirm(commits[:count])
        except Exception as error:
            with self._changed:
                self._has_failed = True
                self._changed.notify_all()
            self._loop.fail(error)

    def _confirm(self, commits: list[Commit]) -> None:
        with self._changed:
            for commit in commits:
                self._queue.popleft()
                self._queued_bytes -= len(commit.write.record)
                self._bases[id(commit.write.log)] -= bool(commit.write.base)
            self._changed.notify_all()
        self._loop.post(Committed(commits[-1].number))
