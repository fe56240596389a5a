"""Looking on from somewhere else: a key that may ask how a run is doing, and nothing more.

`dlctl keys reader FILE` writes all that it takes: where the coordinator listens, its public key,
and a secret key that it knows as a reader's. The file is good until the run gets new keys, or
another port: a run that is stopped and started again may have one.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from dlctl import client, keys
from dlctl.client import MUTE_S, REQUEST_BITS, Question, Result
from dlctl.errors import DlctlError, NotPermitted, Unreachable
from dlctl.messages import Request

FILE_BYTES_MAX = 4096
SCHEMA = "dlctl.reader/1"
RENEWED = "ask the owner of the run for new ones: dlctl keys rotate, and dlctl keys reader FILE"


class ReaderKey(NamedTuple):
    run: str
    address: str
    coordinator: str
    """Its public key."""
    secret: str

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return json.dumps({"schema": SCHEMA, **self._asdict()}, indent=1).encode() + b"\n"


def load(path: Path) -> ReaderKey:
    """Read a reader's key file. Raises DlctlError if others may know it, or if it is none."""
    data = keys.read_private(path, FILE_BYTES_MAX, "the reader's key", RENEWED)
    try:
        content = json.loads(data)
        found = ReaderKey(*(content[name] for name in ReaderKey._fields))
        is_ours = content["schema"] == SCHEMA and all(type(value) is str for value in found)
        is_ours = is_ours and len(found.secret) == len(found.coordinator) == keys.KEY_LETTERS
    except (ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        hint = "ask the owner of the run for one: dlctl keys reader FILE"
        raise DlctlError("this is no reader's key", where=str(path), hint=hint)
    return found


def status(key: ReaderKey, timeout_s: float = MUTE_S) -> Result:
    """{"run": keys of the run, "daemons": rows}, with times as this machine's clock has them.

    Raises Unreachable if nobody answers, and NotPermitted if whoever does has other keys.
    """
    daemons: list[Any] = []
    while True:
        asked_at = time.time()
        result = _ask(key, "status", {"first": len(daemons)}, timeout_s)
        daemons += (of_clock(row, asked_at - result["now"]) for row in result["daemons"])
        if len(daemons) >= result["of"] or not result["daemons"]:
            return {"run": of_clock(result["run"], asked_at - result["now"]), "daemons": daemons}


def of_clock(value: Any, offset_s: float) -> Any:
    """The same JSON, its times (keys that end in _at or _since) moved by so many seconds."""
    if isinstance(value, list):
        return [of_clock(item, offset_s) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {}
    for key, item in value.items():
        is_time = key == "at" or key.endswith(("_at", "_since"))
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        moved[key] = item + offset_s if is_time and is_number else of_clock(item, offset_s)
    return moved


def _ask(key: ReaderKey, verb: str, arguments: dict[str, Any], timeout_s: float) -> Result:
    import zmq

    number = random.SystemRandom().getrandbits(REQUEST_BITS)
    with closing(_FromAfar(key, Request(number, verb, arguments), timeout_s, zmq.Context())) as it:
        return client.answer(it)


class _FromAfar(Question):
    """Of the coordinator nothing is known but where it is, and its key."""

    def __init__(self, key: ReaderKey, request: Request, timeout_s: float, context: Any) -> None:
        super().__init__(Path(key.run), request, timeout_s, context)
        self.key_file = key
        self._connect(key.address, None, key.coordinator)

    def _check(self) -> None:
        try:
            self._check_handshakes()
        except NotPermitted as error:
            error.hint = "its keys may be new ones; ask the owner: dlctl keys reader FILE"
            raise
        if time.monotonic() - self.began_at >= self.timeout_s:
            raise Unreachable(
                f"nobody answers for {self.key_file.run} for {self.timeout_s:.0f} s",
                where=self.address,
                hint="is the run live, and can this address be reached from here?",
            )

    def _own_keys(self) -> keys.Pair:
        import zmq

        secret = self.key_file.secret
        return keys.Pair(zmq.curve_public(secret.encode()).decode(), secret)
