"""Requests of the command line: stop, set, checkpoint, scale, restart, rotate.

And status, for clients that cannot read the run's files. A client resends a request under one
number until it gets an answer; each request is executed once (`Clients`).

Daemons' reports are cut so that an answer about several of them fits into one header (`shortened`).
A report may be as large as a header and as deeply nested as a message may be. Several such reports
would exceed both limits: no client could read the answer, or see which daemon is at fault.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from itertools import takewhile
from typing import Any

from dlctl.errors import DlctlError
from dlctl.machine import Peer
from dlctl.messages import Json, Message, Reply, Request
from dlctl.roles.coordinator import shutdown
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.rotation import Rotation
from dlctl.roles.coordinator.run_state import Part
from dlctl.roles.coordinator.scaling import Scaling
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.coordinator.status import StatusReport
from dlctl.roles.protocol.context import COORDINATOR, Context

ANSWERS_KEPT = 256
NOT_VALID = (TypeError, ValueError, OverflowError)
"""What conversions of a client's values raise; the last one by int(inf)."""
Verb = Callable[[Request, float], None]
Look = Callable[[Request, float], Json]


class Clients:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.verbs: dict[str, Verb] = {}
        self.looks: dict[str, Look] = {}
        self._peers: OrderedDict[int, Peer] = OrderedDict()
        self._answers: dict[int, Reply] = {}

    def serve(self, verbs: dict[str, Verb], looks: dict[str, Look]) -> None:
        """`looks`: read-only requests (`authz.READABLE`), answered at once and not stored, so that
        they evict no other answers.
        """
        self.verbs, self.looks = verbs, looks

    def on_request(self, peer: Peer, request: Request, now: float) -> None:
        """Execute a request once; a repeated request gets the current answer."""
        if request.verb in self.looks:
            self._look(peer, request, now)
            return
        known = request.request in self._answers
        self._peers[request.request] = peer
        if known:
            self.context.send(peer, self._answers[request.request])
            return
        self.answer(request.request, False, "", {"phase": "received"})
        try:
            if request.verb not in self.verbs:
                raise DlctlError(f'the coordinator does not know the request "{request.verb:.40}"')
            self.verbs[request.verb](request, now)
        except DlctlError as error:
            self.answer(request.request, True, error.message, _how(error))
        except (*NOT_VALID, KeyError, AttributeError) as error:
            self.answer(request.request, True, f"the request is not valid: {error}", {})
        while len(self._peers) > ANSWERS_KEPT:
            oldest, _ = self._peers.popitem(last=False)
            del self._answers[oldest]

    def _look(self, peer: Peer, request: Request, now: float) -> None:
        try:
            result, error = self.looks[request.verb](request, now), ""
        except NOT_VALID as failure:
            result, error = {}, f"the request is not valid: {failure}"
        self.context.send(peer, Reply(request.request, True, error, result))

    def refuse(self, peer: Peer, message: Message, error: DlctlError) -> None:
        """Refuse a message that the sender's key does not permit; store no answer."""
        if isinstance(message, Request):
            self.context.send(peer, Reply(message.request, True, error.message, _how(error)))

    def answer(self, request: int, done: bool, error: str, result: Json) -> None:
        """Send the client the progress or the result of its request."""
        if request in self._peers:
            reply = Reply(request, done, error, result)
            self._answers[request] = reply
            self.context.send(self._peers[request], reply)


def _how(error: DlctlError) -> Json:
    """What a client needs to know of an error besides its text."""
    hint = {"hint": error.hint} if error.hint else {}
    return {"exit_code": error.exit_code, **hint}


# ---------------------------------------------------------------- answers that fit

TEXT_BYTES_MAX = 400
LEVELS_MAX = 4
"""Nesting depth of lists and objects; deeper ones are shown as empty."""
VALUE_BYTES = 9
"""Upper bound for a number, or for the prefix of any other value."""


def shortened(value: Any, room_bytes: int) -> Any:
    """The same JSON without the logs' last lines, in about `room_bytes` at most.

    Texts are cut to `TEXT_BYTES_MAX`; lists and objects are filled while there is room, scalars
    first: our own keys, at the first level, are always present.
    """
    return _Room(room_bytes).fill(value, LEVELS_MAX)


@dataclass(slots=True)
class _Room:
    left_bytes: int

    def fill(self, value: Any, levels: int) -> Any:
        self.left_bytes -= VALUE_BYTES
        if isinstance(value, str):
            data = value.encode(errors="backslashreplace")[:TEXT_BYTES_MAX]
            self.left_bytes -= len(data)
            return data.decode(errors="ignore")
        if isinstance(value, dict):
            return self._object(value, levels) if levels else {}
        if isinstance(value, (list, tuple)):
            fitting = takewhile(lambda _: levels > 0 and self.left_bytes > 0, value)
            return [self.fill(part, levels - 1) for part in fitting]
        return value

    def _object(self, values: dict[str, Any], levels: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in sorted(values, key=lambda key: isinstance(values[key], (dict, list, tuple))):
            if self.left_bytes <= 0 and levels < LEVELS_MAX:
                break
            if key != "last_lines":
                found[self.fill(key, 0)] = self.fill(values[key], levels - 1)
        return found


# ---------------------------------------------------------------- the requests

NOTIFY_EVERY_S = 1.0
"""Between two progress messages to a waiting command."""
ROWS_MAX = 8
ROW_BYTES, RUN_BYTES = 5_000, 12_000
"""Room in an answer for one daemon, and for the run; in total less than a header's limit."""


@dataclass(eq=False)
class Requests(Part):
    clients: Clients
    _: KW_ONLY
    status: StatusReport
    settings: SettingChanges
    checkpointing: Checkpointing
    scaling: Scaling
    rotation: Rotation

    def __post_init__(self) -> None:
        verbs: dict[str, Verb] = {
            "stop": self._stop,
            "set": self._set,
            "checkpoint": self._save,
            "scale": self._scale,
            "restart": self._restart,
            "rotate": self.rotation.begin,
        }
        self.clients.serve(verbs, looks={"status": self._status})
        self._stop_requests: list[int] = []
        self._save_requests: list[int] = []
        self._sent: tuple[Any, ...] = ()
        """Key of the newest progress message (`_key`)."""
        self._send_at = 0.0

    def _status(self, request: Request, now: float) -> Json:
        """The state of the run, and `ROWS_MAX` daemons from number `first` on: an answer has to
        fit into one header. Times are this machine's monotonic clock; `now` is its current value.
        """
        run, rows = self.status.seen(now)
        first = int(request.arguments.get("first", 0))
        shown = [shortened(row, ROW_BYTES) for row in rows[first : first + ROWS_MAX]]
        of_job = {"run_id": self.run.run_id, "name": self.run.job.job.name}
        run = of_job | shortened(run, RUN_BYTES)
        return {"now": now, "run": run, "daemons": shown, "of": len(rows)}

    def _stop(self, request: Request, now: float) -> None:
        arguments = request.arguments
        kill, save = bool(arguments.get("kill")), arguments.get("checkpoint", True)
        grace_s = float(arguments.get("grace_s", self.run.job.timeouts.grace_s))
        if not 0.0 <= grace_s < math.inf:
            raise ValueError(f"grace_s is {grace_s}")
        reason = shutdown.stop_reason(arguments.get("origin"), kill=kill)
        self.control.end("stopped", reason, now, bool(save) and not kill, grace_s)
        assert self.run.shutdown is not None
        if kill:
            self.run.shutdown.hurry(now)
        # Only from here on: clients must not see steps that were skipped.
        self._stop_requests.append(request.request)
        self.notify_stopping(False, now)

    def notify_stopping(self, done: bool, now: float) -> None:
        """Send the progress of the shutdown to the clients that wait for its end."""
        end = self.run.shutdown
        assert end is not None
        # Which files a checkpoint waits for, and whether the record can be written, is known soon.
        soon = end.step == shutdown.SAVING and not self.checkpointing.late()
        soon |= end.step == shutdown.RECORDING and not self.run.context.unwritten
        pending = [] if done or soon else end.pending()
        self._send_progress(self._stop_requests, end.step, pending, now, done)

    def tell(self, now: float) -> None:
        """Tell waiting clients which daemons delay them, at changes; short waits are left out."""
        end, saving = self.run.shutdown, self.checkpointing
        if end is not None and self._stop_requests:
            if end.step != shutdown.OVER:
                self._send_if_changed(self._stop_requests, end.step, end.pending(), now)
        elif self._save_requests and saving.active:
            self._send_if_changed(self._save_requests, shutdown.SAVING, saving.late(), now)

    def _send_if_changed(
        self, requests: list[int], phase: str, names: list[str], now: float
    ) -> None:
        if names and now >= self._send_at and self._key(phase, names) != self._sent:
            self._send_progress(requests, phase, names, now)

    def _send_progress(
        self, requests: list[int], phase: str, names: list[str], now: float, done: bool = False
    ) -> None:
        self._sent, self._send_at = self._key(phase, names), now + NOTIFY_EVERY_S
        waiting = [self._stuck(name) or name for name in names]
        result: Json = {"phase": phase, "waiting": waiting, "state": self.run.state}
        until = self.checkpointing.gives_up_at() if phase == shutdown.SAVING else None
        if until is not None and names and all(self._stuck(name) for name in names):
            result["left_s"] = max(0.0, until - now)
        for request in requests:
            self.clients.answer(request, done, "", result)

    def _key(self, phase: str, names: list[str]) -> tuple[Any, ...]:
        """A new key is worth a message; the time for which a daemon is stuck is not in it."""
        return phase, *((name, bool(self._stuck(name))) for name in names)

    def _stuck(self, name: str) -> str:
        """As in "worker-1 (in one batch for 57 s)"; "" if it is not."""
        daemon = self.run.members.get(name)
        return f"{name} ({daemon.phase})" if daemon is not None and daemon.stuck else ""

    def _set(self, request: Request, now: float) -> None:
        """{"names": [names and globs of daemons], "settings": {key: text}}."""
        patterns = [str(name) for name in request.arguments["names"]]
        texts = {str(key): str(text) for key, text in request.arguments["settings"].items()}
        number = request.request
        self.settings.request(patterns, texts, now, lambda rows: self._agree(number, rows))

    def _agree(self, request: int, result: Json) -> None:
        """Confirm a request, and report if the change cannot be persisted."""
        why = self.run.context.unwritten
        self.clients.answer(request, True, "", {**result, "unwritten": why} if why else result)

    def _save(self, request: Request, now: float) -> None:
        number = request.request
        if not self.run.is_working:
            raise DlctlError(f"the run is {self.run.state}: there is nothing to save now")
        if not self._save_requests:
            self._sent, self._send_at = (), now + NOTIFY_EVERY_S
        self._save_requests.append(number)

        def done(row: Json) -> None:
            self._save_requests.remove(number)
            self.clients.answer(number, True, row["error"], row)

        self.control.begin_checkpoint(now, done)

    def _scale(self, request: Request, now: float) -> None:
        result = self.scaling.scale(int(request.arguments["workers"]), now)
        self._agree(request.request, result)

    def _restart(self, request: Request, now: float) -> None:
        names = [str(name) for name in request.arguments["names"]]
        self.scaling.restart([name for name in names if name != COORDINATOR], now)
        self._agree(request.request, {"restarting": names})
        if COORDINATOR in names:
            self.scaling.hand_over("the coordinator is restarted on request")
