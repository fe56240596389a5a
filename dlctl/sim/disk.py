"""The disk that all daemons of a simulated run share: how long a file takes, when it is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SAVE_S = 0.05
NO_SPACE = "no space left on device"


def _never() -> bool:
    return False


@dataclass(slots=True)
class Disk:
    save_s: float = SAVE_S
    """From the request to save a file to its completion."""
    commit_s: float = 0.0
    """From the begin of a sync of a server's journal to its completion."""
    slow_s: Mapping[str, float] = field(default_factory=dict)
    """Process -> the same, for processes whose files take longer."""
    full: int = 0
    """While this is not 0, no file can be written."""
    tight: int = 0
    """While this is not 0, only small files can: rows and records, no checkpoint and no state."""
    fails: Callable[[], bool] = field(default=_never)
    """Whether the next file fails for other reasons."""

    def takes_s(self, name: str) -> float:
        """How long a file of this process takes."""
        return self.slow_s.get(name, self.save_s)

    def error(self) -> str:
        """The error of writing a file now, or ""."""
        return NO_SPACE if self.full or self.tight or self.fails() else ""
