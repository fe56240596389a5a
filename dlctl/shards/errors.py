"""Why a state on a disk cannot be used, or not now."""

from __future__ import annotations

from dlctl.errors import DlctlError


class Unusable(DlctlError):
    """A persisted state cannot be resumed; the message says why."""


class StateHeld(DlctlError):
    """Another process has this state open. It may be about to exit; a retry may succeed."""


class Diverged(DlctlError):
    """An update has produced an infinity or a NaN. It is in no commit, and no commit may follow:
    only the last committed state of this shard is valid.
    """


class NoRoom(DlctlError):
    """The disk has no room for a state at the moment. Existing data is not damaged."""
