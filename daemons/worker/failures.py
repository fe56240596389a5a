"""What the user's code or a method's engine has raised, as one line and a traceback."""

from __future__ import annotations

import traceback

from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import TaskFailed


def failure_of(error: BaseException) -> TaskFailed:
    """To be called while it is handled."""
    if isinstance(error, DlctlError):
        where = f" ({error.where})" if error.where else ""
        hint = f"; {error.hint}" if error.hint else ""
        return TaskFailed(f"{error.message}{where}{hint}", getattr(error, "detail", ""))
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, Exception):
        return TaskFailed(f"a bug in dlctl: {what}", traceback.format_exc())
    return TaskFailed(f"something ended the computing with {what}", traceback.format_exc())
