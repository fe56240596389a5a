"""`python -P -m daemons.node`: answers requests about this machine, one JSON object per line on
standard input, and one per line on standard output after a mark. It exits at the end of its input,
or after a minute without a request.

All other output, of any library, goes to standard error: ssh forwards it to the caller.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from importlib import import_module
from typing import Any

from dlctl.errors import DlctlError, UsageError
from dlctl.launch.answers import MARK, as_value

IDLE_S_MAX = 60.0
REQUEST_BYTES_MAX = 64 << 20
VERBS = ("begin", "look", "end", "examine", "listen", "reach")
"""Modules, imported on demand, whose functions of the same name answer."""


def main() -> int:
    """Answer requests until none arrive. The exit code is that of the last error, if any."""
    answers, code = os.dup(1), 0
    os.dup2(2, 1)
    with os.fdopen(answers, "wb", buffering=0) as stream:
        stream.write(MARK + b"\n")
        while select.select([0], [], [], IDLE_S_MAX)[0]:
            line = sys.stdin.buffer.readline(REQUEST_BYTES_MAX + 1)
            if not line:
                break
            value, code = _answer(line)
            stream.write(json.dumps(value).encode() + b"\n")
            if len(line) > REQUEST_BYTES_MAX:
                break
    return code


def _answer(line: bytes) -> tuple[dict[str, Any], int]:
    """The answer, and the exit code that corresponds to it."""
    try:
        return _value(line), 0
    except DlctlError as error:
        why = error
    except OSError as error:
        why = DlctlError(f"{error.strerror or error}", where=str(error.filename or "") or None)
    except (ValueError, RecursionError) as error:
        why = UsageError(f"not a request: {error}")
    return as_value(why), why.exit_code


def _value(line: bytes) -> dict[str, Any]:
    request = json.loads(line)  # A line that was cut is no JSON.
    if type(request) is not dict:
        raise UsageError("not a request: it has to be one JSON object")
    verb = request.get("verb")
    if verb == "hello":
        return {"at": time.time()}
    if verb not in VERBS:
        has = ", ".join(("hello", *VERBS))
        raise UsageError(
            f"this version of dlctl does not know the request; it knows {has}",
            hint="install the same version there",
        )
    answer = getattr(import_module(f"daemons.node.{verb}"), verb)
    return dict(answer(request))


if __name__ == "__main__":
    sys.exit(main())
