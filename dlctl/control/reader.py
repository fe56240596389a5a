"""Looking on from somewhere else: a key that may ask how a run is doing, and nothing more.

`dlctl keys reader FILE` writes all that it takes: where the coordinator listens, its public key,
and a secret key that it knows as a reader's. The file is good until the run gets new keys, or
another port: a run that is stopped and started again may have one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dlctl.control import client, keys
from dlctl.control.client import MUTE_S, Question, Result
from dlctl.errors import DlctlError, NotPermitted, Unreachable

if TYPE_CHECKING:
    from dlctl.messages import Request

FILE_BYTES_MAX = 4096
SCHEMA = "dlctl.reader/1"
Ask = Callable[[str, dict[str, Any]], Result]
"""(Verb, arguments) -> the coordinator's answer. Raises as `client.answer` does."""
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

    Raises Unreachable if nobody answers within `timeout_s` seconds, to each of the questions that
    it takes, and NotPermitted if whoever does has other keys.
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
    """The same JSON, its times (keys that end in at or since) moved by so many seconds."""
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
    """One connection for as many questions as there are: a key may come only so often."""
    import zmq

    with closing(_FromAfar(key, timeout_s, zmq.Context())) as question:

        def ask(verb: str, arguments: dict[str, Any]) -> Result:
            question.begin(client.request_of(verb, arguments))
            return client.answer(question)

        yield ask


class _FromAfar(Question):
    """Of the coordinator nothing is known but where it is, and its key."""

    def __init__(self, key: ReaderKey, timeout_s: float, context: Any) -> None:
        super().__init__(Path(key.run), client.request_of("status", {}), timeout_s, context)
        self.key_file = key
        self._connect(key.address, None, key.coordinator)

    def begin(self, request: Request) -> None:
        """Ask this next, over the connection that there is."""
        self.request, self.began_at, self.answered = request, time.monotonic(), False

    def _check(self) -> None:
        try:
            self._check_handshakes()
        except NotPermitted as error:
            error.hint = "its keys may be new ones; ask the owner: dlctl keys reader FILE"
            raise
        if time.monotonic() - self.began_at >= self.timeout_s:
            raise self._kept_out() or Unreachable(
                f"nobody answers for {self.key_file.run} for {self.timeout_s:.0f} s",
                where=self.address,
                hint="is the run live, and can this address be reached from here?",
            )

    def _own_keys(self) -> keys.Pair:
        import zmq

        secret = self.key_file.secret
        return keys.Pair(zmq.curve_public(secret.encode()).decode(), secret)
