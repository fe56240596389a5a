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


def run(module: str, arguments: Sequence[str], where: Path, what: str, **options: Any) -> str:
    """The output of `python -m MODULE`. `options` are those of `subprocess.run`.

    Raises DlctlError: the error that the process wrote as JSON, or else `what` and how it ended, at
    `where`.
    """
    argv = [sys.executable, "-P", "-m", module, *arguments]
    done: subprocess.CompletedProcess[str]
    done = subprocess.run(argv, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise error_of(done.stderr, done.returncode, where, what)
    return done.stdout + done.stderr


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
