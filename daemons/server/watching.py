"""A state whose files are removed while it is in use is put back, before anybody needs it.

A server notices nothing of that: an open file lives on without its name. But with the server the
only copy would be gone. Usually it is systemd-logind: with RemoveIPC=yes, its default, it removes
all that a user has in shared memory at the end of the user's last session.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from daemons.process import reason_of
from daemons.server.files import TablesInFiles
from dlctl.errors import DlctlError
from dlctl.shards.base import Storages

log = logging.getLogger("dlctl")
LOOK_S = 2.0
"""Between two looks; a server that dies in between takes a removed state with it."""


class Watch:
    """A chore of a server: looks after the files of its shard every `LOOK_S` seconds."""

    def __init__(self, storages: Storages, run_directory: Path) -> None:
        self._files = storages if isinstance(storages, TablesInFiles) else None
        self._run_directory = run_directory
        self._look_at = 0.0
        self._said = ""

    def __call__(self) -> None:
        if self._files is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_S
        try:
            # Without its directory there is no run any more that could need the state.
            if self._files.is_missing() and self._run_directory.is_dir():
                _say_where(self._files.put_back())
            self._said = ""
        except (DlctlError, OSError) as error:
            # As long as this process lives, the state does, and this can be tried again. What was
            # begun and not finished is in nobody's way: a commit writes it all, or ends the server.
            before, self._said = self._said, reason_of(error)
            if self._said != before:
                text = "the state of this shard was removed and cannot be put back: %s"
                log.error(text, self._said)


def _say_where(place: str) -> None:
    log.warning(
        "somebody has removed the state of this shard while it was in use; it was written anew and "
        "is in %s now, nothing is lost. If that came with the end of a session, it was "
        "RemoveIPC=yes of systemd-logind: `loginctl enable-linger` keeps it from doing so",
        place,
    )
