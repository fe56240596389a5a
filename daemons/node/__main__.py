"""`python -P -m daemons.node`: one JSON object on standard input, one on standard output.

Everything else that is printed, by whatever library, goes to standard error: ssh carries it, too,
and whoever has asked sees it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from dlctl.errors import DlctlError, UsageError
from dlctl.launch.answers import MARK, as_value

REQUEST_BYTES_MAX = 64 << 20
VERBS = ("begin", "look", "end")


def main() -> int:
    """Do what is asked. The exit code is that of the error, if there is one."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        value, code = _verb(_request())(), 0
    except DlctlError as error:
        value, code = as_value(error), error.exit_code
    except OSError as error:
        why = DlctlError(f"{error.strerror or error}", where=str(error.filename or "") or None)
        value, code = as_value(why), why.exit_code
    with os.fdopen(answers, "wb") as stream:
        stream.write(MARK + b"\n" + json.dumps(value).encode() + b"\n")
    return code


def _request() -> dict[str, Any]:
    data = sys.stdin.buffer.read(REQUEST_BYTES_MAX + 1)
    try:
        request = json.loads(data) if len(data) <= REQUEST_BYTES_MAX else None
    except (ValueError, RecursionError):
        request = None
    if type(request) is not dict:
        raise UsageError("what has come is no request: it has to be one JSON object")
    return request


def _verb(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """A verb is a module with a function of its name, imported when it is asked for."""
    verb = request.get("verb")
    if verb not in VERBS:
        raise UsageError(f"this dlctl has no such request; it has {', '.join(VERBS)}")
    function = getattr(import_module(f"daemons.node.{verb}"), verb)
    return lambda: dict(function(request))


if __name__ == "__main__":
    sys.exit(main())
