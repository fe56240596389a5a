"""Requests of the command line: stop, set, checkpoint, scale, restart, rotate, invite, revoke.

And status, for clients that cannot read the run's files. A client resends a request under one
number until it gets an answer; each request is executed once (`ClientRequests`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dlctl.errors import DlctlError
from dlctl.roles.coordinator import shutdown
from dlctl.roles.coordinator.checkpointing import Checkpointing
from dlctl.roles.coordinator.rotation import Rotation
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.coordinator.settings import SettingChanges
from dlctl.roles.coordinator.status import StatusReport
from dlctl.roles.coordinator.supervision.guests import Guests
from dlctl.roles.coordinator.supervision.scaling import Scaling
from dlctl.roles.protocol.authz import READABLE
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json, Message, Reply, Request

ANSWERS_KEPT = 256
NOT_VALID = (TypeError, ValueError, OverflowError, KeyError, AttributeError)
"""What a request raises whose arguments are missing or of another type; OverflowError: int(inf)."""
Verb = Callable[[Request, float], Json | bytes | None]
"""Executes a request. Returns its result, or None if that follows by `ClientRequests.answer`; that
of a read-only request as `Reply.data`.
"""


class ClientRequests:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.verbs: dict[str, Verb] = {}
        self._answers: dict[int, tuple[Peer, Reply]] = {}
        """Request number -> the client and its answer, oldest first."""

    def on_request(self, peer: Peer, request: Request, now: float) -> None:
        """Execute a request once; a repeated request gets the current answer. The answers of
        read-only requests are not stored, so that they evict no others.
        """
        number, is_stored = request.request, request.verb not in READABLE
        if is_stored:
            _, newest = self._answers.get(number, (peer, None))
            reply = newest or Reply(number, False, "", {"phase": "received"})
            self._answers[number] = peer, reply
            self.context.send(peer, reply)
            if newest is not None:
                return
        error, result = self._execute(request, now)
        if isinstance(result, bytes):
            self.context.send(peer, Reply(number, True, "", {}, result))
        elif not is_stored:
            self.context.send(peer, Reply(number, True, error, result or {}))
        elif result is not None:
            self.answer(number, True, error, result)
        while len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]

    def _execute(self, request: Request, now: float) -> tuple[str, Json | bytes | None]:
        """Execute a request; returns the error and the result."""
        try:
            if request.verb not in self.verbs:
                raise DlctlError(f'the coordinator does not know the request "{request.verb:.40}"')
            return "", self.verbs[request.verb](request, now)
        except DlctlError as error:
            return error.message, _how(error)
        except NOT_VALID as error:
            return f"the request is not valid: {error}", {}

    def refuse(self, peer: Peer, message: Message, error: DlctlError) -> None:
        """Refuse a message that the sender's key does not permit; store no answer."""
        if isinstance(message, Request):
            self.context.send(peer, Reply(message.request, True, error.message, _how(error)))

    def answer(self, request: int, done: bool, error: str, result: Json) -> None:
        """Send the client the progress or the result of its request."""
        if request in self._answers:
            peer, reply = self._answers[request][0], Reply(request, done, error, result)
            self._answers[request] = peer, reply
            self.context.send(peer, reply)


def _how(error: DlctlError) -> Json:
    """What a client needs to know of an error besides its text."""
    hint = {"hint": error.hint} if error.hint else {}
    return {"exit_code": error.exit_code, **hint}


# ---------------------------------------------------------------- the requests

NOTIFY_EVERY_S = 1.0
"""Interval between two progress messages to a waiting command."""
STATUS_CHARS_MAX, TEXT_CHARS_MAX = 100 * 1024, 400
"""Characters of JSON, before its compression: of the run, of an answer's daemons but the last one,
and of an item of the run if that is too large. A frame of 512 KiB would be sent in segments, which
no client assembles; no daemon can report so much.
"""


@dataclass(eq=False)
class Requests(CoordinatorPart):
    clients: ClientRequests
    _: KW_ONLY
    status: StatusReport
    settings: SettingChanges
    checkpointing: Checkpointing
    scaling: Scaling
    rotation: Rotation
    guests: Guests

    def __post_init__(self) -> None:
        self.clients.verbs = {
            "status": self._status,
            "stop": self._stop,
            "set": self._set,
            "checkpoint": self._save,
            "scale": self._scale,
            "restart": self._restart,
            "rotate": self.rotation.begin,
            "invite": self.guests.invite,
            "revoke": self.guests.revoke,
            "invitations": self.guests.listed,
        }
        self._stop_requests: list[int] = []
        self._save_requests: list[int] = []
        self._sent: tuple[Any, ...] = ()
        """Key of the newest progress message."""
        self._send_at = 0.0

    def _status(self, request: Request, now: float) -> bytes:
        """The state of the run, and as many daemons from number `first` on as fit, at least one.
        Times are this machine's monotonic clock; `now` is its current value.
        """
        run, rows = self.status.look(now)
        run = {"run_id": self.run.run_id, "name": self.run.job.job.name} | run
        if len(json.dumps(run)) > STATUS_CHARS_MAX:  # Daemons have reported long texts.
            run = {key: value for key, value in run.items() if len(str(value)) <= TEXT_CHARS_MAX}
        shown: list[Json] = []
        room = STATUS_CHARS_MAX
        for row in rows[int(request.arguments.get("first", 0)) :]:
            if room <= 0:
                break
            shown.append(_without_log(row))
            room -= len(json.dumps(shown[-1]))
        answer = {"now": now, "run": run, "daemons": shown, "of": len(rows)}
        return zlib.compress(json.dumps(answer).encode())

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
        self._stop_requests.append(request.request)
        self._sent, self._send_at = (), now + NOTIFY_EVERY_S

    def end(self) -> None:
        """The run has ended: answer the clients that wait for that."""
        for request in self._stop_requests:
            result = {"phase": shutdown.OVER, "waiting": [], "state": self.run.state}
            self.clients.answer(request, True, "", result)
        self._stop_requests.clear()

    def tell(self, now: float) -> None:
        """Notify waiting clients of daemons that delay them, at changes, but not of short waits."""
        end, is_stopping = self.run.shutdown, bool(self._stop_requests)
        requests = self._stop_requests if end and is_stopping else self._save_requests
        if not requests or now < self._send_at:
            return
        phase, names = shutdown.SAVING, self.checkpointing.late()
        if end and is_stopping:
            phase, names = end.step, end.pending()
        if not names:
            return
        # For how long a daemon is stuck is no change.
        key = phase, *((name, bool(self._stuck(name))) for name in names)
        if key == self._sent:
            return
        self._sent, self._send_at = key, now + NOTIFY_EVERY_S
        waiting = [self._stuck(name) or name for name in names]
        result: Json = {"phase": phase, "waiting": waiting, "state": self.run.state}
        until = self.checkpointing.gives_up_at() if phase == shutdown.SAVING else None
        if until is not None and names and all(self._stuck(name) for name in names):
            result["left_s"] = max(0.0, until - now)
        for request in requests:
            self.clients.answer(request, False, "", result)

    def _stuck(self, name: str) -> str:
        """As in "worker-1 (in one batch for 57 s)"; "" if the daemon is not stuck."""
        daemon = self.run.members.get(name)
        return f"{name} ({daemon.phase})" if daemon is not None and daemon.stuck else ""

    def _set(self, request: Request, now: float) -> None:
        """{"names": [names and globs of daemons], "settings": {key: text}}."""
        patterns = [str(name) for name in request.arguments["names"]]
        texts = {str(key): str(text) for key, text in request.arguments["settings"].items()}

        def answered(rows: Json) -> None:
            self.clients.answer(request.request, True, "", self._with_trouble(rows))

        self.settings.request(patterns, texts, now, answered)

    def _with_trouble(self, result: Json) -> Json:
        """Report if the change cannot be persisted."""
        why = self.run.context.unwritten
        return {**result, "unwritten": why} if why else result

    def _save(self, request: Request, now: float) -> None:
        number = request.request
        self.check_running()
        if not self._save_requests:
            self._sent, self._send_at = (), now + NOTIFY_EVERY_S
        self._save_requests.append(number)

        def done(row: Json) -> None:
            self._save_requests.remove(number)
            self.clients.answer(number, True, row["error"], row)

        self.control.begin_checkpoint(now, done)

    def _scale(self, request: Request, now: float) -> Json:
        return self._with_trouble(self.scaling.scale(int(request.arguments["workers"]), now))

    def _restart(self, request: Request, now: float) -> Json:
        names = [str(name) for name in request.arguments["names"]]
        self.scaling.restart([name for name in names if name != COORDINATOR], now)
        if COORDINATOR in names:
            self.scaling.hand_over("the coordinator is restarted on request")
        return self._with_trouble({"restarting": names})


def _without_log(row: Json) -> Json:
    """A daemon's row without the last lines of its log."""
    last = row["last_exit"] or {}
    return row | {"last_exit": {k: v for k, v in last.items() if k != "last_lines"} or None}
