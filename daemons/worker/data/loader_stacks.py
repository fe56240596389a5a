"""Where the processes that load data are. On a signal each of them writes its stack to a file in
memory, as faulthandler does it: at once, also while C code holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
import weakref
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, StackSummary

from torch.utils.data._utils import worker

ASKED_WITH = signal.SIGRTMAX - 3
"""The signal that asks for a stack: no library is known to use it."""
ANSWER_S_MAX, LOOK_S = 0.5, 0.02
STACK_BYTES_MAX = 1 << 16
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
"""How faulthandler writes characters that are not ASCII."""


def answer(path: str) -> None:
    """Let this process, which loads data, write its stack to the file whenever it is asked."""
    with suppress(OSError):  # Without /proc nobody can see where it is.
        faulthandler.register(ASKED_WITH, open(path, "ab"), all_threads=False)  # noqa: SIM115


class LoaderStacks:
    def __init__(self) -> None:
        self._file = os.memfd_create("dlctl-stacks", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def of(self, pid: int) -> StackSummary:
        """The frames within torch's loop of this process, innermost last; none if it does not
        answer, or waits for work. Takes up to `ANSWER_S_MAX`.
        """
        os.ftruncate(self._file, 0)
        if not _catches(pid):
            return StackSummary()
        with suppress(ProcessLookupError):
            os.kill(pid, ASKED_WITH)
        deadline, stack, before = time.monotonic() + ANSWER_S_MAX, b"", b""
        while time.monotonic() < deadline and not (stack and stack == before):
            time.sleep(LOOK_S)
            before, stack = stack, os.pread(self._file, STACK_BYTES_MAX, 0)
        return _stack(stack.decode("ascii", "replace"))


def _catches(pid: int) -> bool:
    """Whether the process would survive the question."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if caught := re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE):
            return bool(int(caught[1], 16) >> (ASKED_WITH - 1) & 1)
    return False


def _stack(text: str) -> StackSummary:
    found = [match for line in text.splitlines() if (match := _FRAME.fullmatch(line))]
    frames = [FrameSummary(_unescaped(m["file"]), int(m["line"]), m["name"]) for m in found]
    own = takewhile(lambda frame: frame.filename != worker.__file__, frames)
    return StackSummary.from_list([*own][::-1])


def _unescaped(name: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[found.lastindex or 0], 16)), name)
