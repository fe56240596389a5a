"""Read-only access from another machine: a key that may only query the status of a run.

`dlctl keys reader FILE` writes all that this takes: the coordinator's address, its public key, and
a secret key that the coordinator knows as a reader's. The file is valid until the run gets new keys
or another port, which may happen when it is stopped and started again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.control import client, keys
from dlctl.control.client import NO_REPLY_S, PendingRequest, Result
from dlctl.errors import DlctlError, NotPermitted, Unreachable

if TYPE_CHECKING:
    from dlctl.wire.messages import Request

FILE_BYTES_MAX = 4096
SCHEMA = "dlctl.reader/1"
Ask = Callable[[str, dict[str, Any]], Result]
"""(Verb, arguments) -> the coordinator's answer. Raises as `client.answer` does."""
RENEWED = "ask the owner of the run for new ones: dlctl keys rotate, and dlctl keys reader FILE"


class ReaderKey(NamedTuple):
    run: str
    address: str
    coordinator: str
    """The coordinator's public key."""
    secret: str

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return json.dumps({"schema": SCHEMA, **self._asdict()}, indent=1).encode() + b"\n"


def load(path: Path) -> ReaderKey:
    """Read a reader's key file. Raises DlctlError if it is invalid, or other users may have read
    it.
    """
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
        raise DlctlError("this is not a reader's key", where=str(path), hint=hint)
    return found


def status(key: ReaderKey, timeout_s: float = NO_REPLY_S) -> Result:
    """{"run": keys of the run, "daemons": rows}, with times in this machine's clock.

    Raises Unreachable if a request gets no reply within `timeout_s` seconds, and NotPermitted if
    the process at the address has other keys.
    """
    daemons: list[Any] = []
    with asking(key, timeout_s) as ask:
        while True:
            asked_at = time.time()
            result = ask("status", {"first": len(daemons)})
            offset_s = asked_at - result["now"]
            daemons += (of_clock(row, offset_s) for row in result["daemons"])
            if len(daemons) >= result["of"] or not result["daemons"]:
                return {"run": of_clock(result["run"], offset_s), "daemons": daemons}


def of_clock(value: Any, offset_s: float) -> Any:
    """A copy of a JSON value; its times (keys that end in at or since) are shifted by seconds."""
    if isinstance(value, list):
        return [of_clock(item, offset_s) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {}
    for key, item in value.items():
        is_time = key.rpartition("_")[2] in ("at", "since")
        is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
        moved[key] = item + offset_s if is_time and is_number else of_clock(item, offset_s)
    return moved


@contextmanager
def asking(key: ReaderKey, timeout_s: float) -> Iterator[Ask]:
    """One connection for any number of requests: connections per key are rate-limited."""
    import zmq

    with closing(_RemoteQuestion(key, timeout_s, zmq.Context())) as question:

        def ask(verb: str, arguments: dict[str, Any]) -> Result:
            question.begin(client.request_of(verb, arguments))
            return client.answer(question)

        yield ask


class _RemoteQuestion(PendingRequest):
    """A request for which only the coordinator's address and public key are known."""

    def __init__(self, key: ReaderKey, timeout_s: float, context: Any) -> None:
        super().__init__(Path(key.run), client.request_of("status", {}), timeout_s, context)
        self.key_file = key
        self._connect(key.address, None, key.coordinator)

    def begin(self, request: Request) -> None:
        """Send this request next, over the existing connection."""
        self.request, self.began_at, self.answered = request, time.monotonic(), False

    def _check(self) -> None:
        try:
            self._check_handshakes()
        except NotPermitted as error:
            error.hint = "the run may have new keys; ask its owner: dlctl keys reader FILE"
            raise
        if time.monotonic() - self.began_at >= self.timeout_s:
            raise self._not_admitted() or Unreachable(
                f"no reply from the coordinator of {self.key_file.run} for {self.timeout_s:.0f} s",
                where=self.address,
                hint="is the run live, and is this address reachable from this machine?",
            )

    def _own_keys(self) -> keys.KeyPair:
        import zmq

        secret = self.key_file.secret
        return keys.KeyPair(zmq.curve_public(secret.encode()).decode(), secret)
