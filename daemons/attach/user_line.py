"""Which line of the user's script has called dlctl, for errors."""

from __future__ import annotations

import sys
from types import FrameType

_OWN = ("daemons.", "dlctl.", "torch.")


def user_line() -> str | None:
    """file:line of the innermost caller that is neither dlctl nor torch; None: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not f"{frame.f_globals.get('__name__')}.".startswith(_OWN):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
