"""Which line of the user's script has called dlctl, for errors."""

from __future__ import annotations

import traceback

from daemons.worker.task.user_task import user_line as line_in


def user_line() -> str | None:
    """file:line of the innermost caller in the user's own code; None: there is none."""
    return line_in(traceback.extract_stack())
