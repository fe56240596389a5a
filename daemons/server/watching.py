"""Re-creates the files of a state that were removed while in use, before they are needed.

A server does not notice the removal: an open file exists without its name. But with the server the
only copy would be lost. The usual cause is systemd-logind: with RemoveIPC=yes, its default, it
removes all files of a user in shared memory at the end of the user's last session.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from daemons.process import in_words, reason_of
from daemons.server.files import TablesInFiles
from dlctl.errors import DlctlError, TimedOut
from dlctl.shards.base import Storages

log = logging.getLogger("dlctl")
RESTORED = (
    "the state of this shard was removed while it was in use; it was written again and is in %s "
    "now, nothing is lost. If a session of this user has just ended, the cause was RemoveIPC=yes "
    "of systemd-logind: `loginctl enable-linger` prevents it"
)


class Watch:
    """A chore of a server: checks the files of its shard about once a second. If the server dies in
    between, a removed state is lost.
    """

    def __init__(
        self, storages: Storages, run_directory: Path, await_commits: Callable[[], None]
    ) -> None:
        """await_commits: returns when no commit is under way, or raises TimedOut soon."""
        self._storages = storages
        self._run_directory = run_directory
        self._await_commits = await_commits
        self._reported = ""

    def __call__(self) -> None:
        if not isinstance(self._storages, TablesInFiles):
            return
        failed = ""
        for table in self._storages.tables():
            try:
                # Without its directory the run no longer exists and does not need the state.
                # One that cannot be read is no news of the state: `Path.is_dir` would raise.
                if os.path.isdir(self._run_directory) and table.is_missing():
                    # A commit may be replacing the files: then they are there when it is done.
                    self._await_commits()
                    if place := table.put_back():
                        log.warning(RESTORED, place)
            except TimedOut as error:  # The commits are those of all tables: wait for them once.
                failed = in_words(error)
                break
            except (DlctlError, OSError) as error:
                # While this process is alive, the state exists, and this can be retried. Incomplete
                # files are harmless: a commit writes everything, or ends the server.
                failed = reason_of(error)
        if failed and failed != self._reported:
            log.error("the state of this shard was removed and cannot be restored: %s", failed)
        self._reported = failed
