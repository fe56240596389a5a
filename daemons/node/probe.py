"""`python -P -m daemons.node.probe`: answers questions about this machine, for `dlctl doctor`.

One JSON object per line on standard input, one per line on standard output behind a mark; it ends
with its input, or when nobody has asked anything for a minute. Nothing on the machine is changed.

    hello     what time it is here             listen   take connections of those who have a token
    examine   what there is (`examine.py`)     reach    connect to others who listen (`measure.py`)
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from daemons.node.listening import Listeners
from daemons.node.measure import reach
from daemons.node.requests import Request, field
from dlctl.errors import DlctlError, UsageError
from dlctl.launch.answers import MARK, as_value

IDLE_S_MAX = 60.0
LINE_BYTES_MAX = 1 << 20
Answers = Callable[[Request], dict[str, Any]]


def main() -> int:
    """Answer until nobody asks any more."""
    answers = os.dup(1)
    os.dup2(2, 1)
    listeners = Listeners()
    verbs: dict[str, Answers] = {
        "hello": _hello,
        "examine": _examine,
        "listen": listeners.listen,
        "reach": _reach,
    }
    with os.fdopen(answers, "wb", buffering=0) as stream:
        stream.write(MARK + b"\n")
        while (line := _line()) is not None:
            stream.write(json.dumps(_answer(line, verbs)).encode() + b"\n")
    return 0


def _answer(line: bytes, verbs: dict[str, Answers]) -> dict[str, Any]:
    try:
        request = json.loads(line)
        if type(request) is not dict or request.get("verb") not in verbs:
            raise UsageError("this dlctl has no such request", hint="install the same one there")
        return verbs[request["verb"]](request)
    except DlctlError as error:
        return as_value(error)
    except (OSError, ValueError, RecursionError) as error:
        return as_value(DlctlError(f"it could not be looked at: {error}"))


_buffer = bytearray()


def _line() -> bytes | None:
    """The next request; None when there will be none."""
    while b"\n" not in _buffer:
        if len(_buffer) > LINE_BYTES_MAX or not select.select([0], [], [], IDLE_S_MAX)[0]:
            return None
        piece = os.read(0, 1 << 16)
        if not piece:
            return None
        _buffer.extend(piece)
    line, _, rest = bytes(_buffer).partition(b"\n")
    _buffer[:] = rest
    return line


def _hello(request: Request) -> dict[str, Any]:
    return {"at": time.time(), "host": socket.gethostname()}


def _examine(request: Request) -> dict[str, Any]:
    from daemons.node.examine import examine  # Here, because numpy takes a while to import.

    return examine(request)


def _reach(request: Request) -> dict[str, Any]:
    return {"reached": [reach(target) for target in field(request, "targets", list)]}


if __name__ == "__main__":
    sys.exit(main())
