"""Work that needs torch or runs the user's code, done in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.util import values
from dlctl.util.outfile import BROKEN_PIPE_EXIT_CODE


def run(
    module: str,
    arguments: Sequence[str],
    where: Path,
    what: str,
    *,
    stdout: int | None = subprocess.PIPE,
    **options: Any,
) -> str:
    """The output of `python -m MODULE`. stdout: None if it writes to that of this process.
    `options`: more of `subprocess.run`.

    Raises DlctlError: the error that the process wrote as JSON, or else `what` and how it ended, at
    `where`; BrokenPipeError if nobody reads stdout any more.
    """
    argv = [sys.executable, "-P", "-m", module, *arguments]
    done: subprocess.CompletedProcess[str]
    options |= {"text": True, "errors": "backslashreplace"}
    done = subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, **options)
    if done.returncode == BROKEN_PIPE_EXIT_CODE and stdout is None:
        raise BrokenPipeError
    if done.returncode != 0:
        raise error_of(done.stderr, done.returncode, where, what)
    return (done.stdout or "") + done.stderr


def error_of(stderr: str, code: int, where: Path, what: str) -> DlctlError:
    lines = stderr.strip().splitlines()
    try:
        facts = json.loads(lines[-1])
        error = DlctlError(facts["message"], where=facts["where"], hint=facts["hint"])
        error.exit_code = code
        return error
    except (IndexError, KeyError, TypeError, ValueError):
        words = "\n".join(lines) or values.exit_in_words(code)
        return DlctlError(f"{what}: {words}", where=str(where))
