"""Client for requests to a running coordinator; reports the cause if no reply arrives.

A request carries a random number and is resent every second until the first reply. So a lost
message costs a second, and the coordinator deduplicates a repeated one by its number. The socket
has no routing id, so two clients never displace each other.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.control import unresponsive
from dlctl.errors import (
    DlctlError,
    NotFound,
    NotPermitted,
    RemoteProtocolError,
    TimedOut,
    Unreachable,
    UsageError,
)
from dlctl.runs import database
from dlctl.util import hints, processes
from dlctl.util.units import format_duration

if TYPE_CHECKING:
    import zmq

    from dlctl.control import keys
    from dlctl.wire.messages import Reply, Request

RESEND_S = 1.0
REFUSED_S = 2.0
"""How long all connections must fail for their cause to be permanent."""
NO_REPLY_S = 15.0
"""A responsive coordinator acknowledges at once; without a reply for this long, it is mute."""
CONNECT_S = 0.2
"""Interval between two checks for an address that is not known yet."""
LAST_REPLY_S = 0.2
RESULT_BYTES_MAX = 4 * 1024 * 1024
"""The largest decompressed size of a result: a few compressed bytes could stand for gigabytes."""
REQUEST_BITS = 53
"""So that every JSON reader represents the number exactly."""

Result = dict[str, Any]


def ask(
    directory: Path,
    verb: str,
    arguments: dict[str, Any],
    timeout_s: float,
    on_progress: Callable[[Result], None] | None = None,
) -> Result:
    """Send a request to the coordinator of the run in `directory`, wait until it is done, and
    return its result.

    `on_progress` receives every intermediate result. Raises DlctlError with the coordinator's
    message if it refuses, Unreachable if it is gone, mute or has no address yet, and TimedOut if
    it has answered but is not done after `timeout_s` seconds.
    """
    import zmq

    request = request_of(verb, arguments)
    with closing(PendingRequest(directory, request, timeout_s, zmq.Context())) as question:
        return answer(question, on_progress)


def request_of(verb: str, arguments: dict[str, Any]) -> Request:
    """A request with a unique number."""
    from dlctl.wire.messages import Request

    return Request(random.SystemRandom().getrandbits(REQUEST_BITS), verb, arguments)


def answer(question: PendingRequest, on_progress: Callable[[Result], None] | None = None) -> Result:
    """Wait for the final answer. Raises as `ask` does."""
    while True:
        reply = question.next_reply()
        if reply.error:
            raise _refusal(reply)
        if reply.done:
            return _uncompressed(reply.data) if reply.data else reply.result
        if on_progress is not None:
            on_progress(reply.result)


def _uncompressed(data: bytes) -> Result:
    """Decode a compressed result. Raises RemoteProtocolError for what is no object in JSON of at
    most `RESULT_BYTES_MAX`.
    """
    try:
        result = json.loads(zlib.decompressobj().decompress(data, RESULT_BYTES_MAX))
    except (zlib.error, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the coordinator's answer cannot be read: {error}") from None
    if not isinstance(result, dict):
        raise RemoteProtocolError("the coordinator's answer is no object")
    return result


def _refusal(reply: Reply) -> DlctlError:
    """The coordinator's error, as it was raised there."""
    code, hint = reply.result.get("exit_code"), reply.result.get("hint")
    kinds: tuple[type[DlctlError], ...] = (UsageError, NotFound, NotPermitted)
    kind = next((kind for kind in kinds if kind.exit_code == code), DlctlError)
    return kind(reply.error, hint=hint if isinstance(hint, str) else None)


@dataclass(frozen=True, slots=True)
class _Refusals:
    """Consecutive failed connections, from the socket monitor."""

    since: float
    latest: float
    is_final: bool
    """libzmq does not retry after the latest one."""

    def are_no_accident(self, now: float) -> bool:
        return (now if self.is_final else self.latest) - self.since > REFUSED_S


class PendingRequest:
    """One request in flight: the socket, the coordinator's address, the deadline."""

    def __init__(
        self, directory: Path, request: Request, timeout_s: float, context: zmq.Context[Any]
    ) -> None:
        self.directory = directory
        self.request = request
        self.timeout_s = timeout_s
        self.began_at = time.monotonic()
        self.answered = False
        self.context = context
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.refusals: _Refusals | None = None
        self.is_put_off = False
        """The coordinator answered the latest connection with `COME_LATER`."""
        self.address = ""
        self.pid: int | None = None
        self.key = ""

    def close(self) -> None:
        self.context.destroy(linger=0)

    def next_reply(self) -> Reply:
        """The next reply to this request; resends the request until the first reply arrives."""
        reply = self._receive(0.0)
        while reply is None:
            try:
                self._check()
            except Gone:
                # Its last reply may still be in flight.
                if (reply := self._receive(LAST_REPLY_S)) is None:
                    raise
                break
            if self.socket is not None and not self.answered:
                self._send(self.socket)
            reply = self._receive(min(RESEND_S if self.socket else CONNECT_S, self._left_s()))
        self.answered = True
        return reply

    def _left_s(self) -> float:
        return self.began_at + self.timeout_s - time.monotonic()

    def _check(self) -> None:
        """Connect to the coordinator's current address; raise if it is gone or timed out.

        The agent restarts a coordinator that died: then the request goes to the new one.
        """
        run = database.read(self.directory)
        pid = run.get("pid")
        is_gone = pid is not None and not processes.is_alive(pid, run.get("pid_start"))
        if is_gone and not _is_restarted(run):
            raise _gone(self.directory, run)
        address = run.get("control") or ""
        key = run.get("control_key") or ""
        if (address, pid, key) != (self.address, self.pid, self.key):
            self._connect(address, pid, key)
        self._check_handshakes()
        waited_s = time.monotonic() - self.began_at
        if waited_s >= (self.timeout_s if self.answered else min(self.timeout_s, NO_REPLY_S)):
            raise _gone(self.directory, run) if is_gone else self._too_late(run, waited_s)

    def _check_handshakes(self) -> None:
        """Reconnect after `COME_LATER`: libzmq does not.

        Raises NotPermitted if the process at the address keeps refusing connections.
        """
        from zmq.utils.monitor import recv_monitor_message

        now, reconnects = time.monotonic(), False
        while self.monitor is not None and self.monitor.poll(0):
            news = recv_monitor_message(self.monitor)
            self._note_handshake(int(news["event"]), int(news["value"]), now)
            reconnects = self.is_put_off
        if reconnects:
            self._connect(self.address, self.pid, self.key)
        if self.refusals is not None and self.refusals.are_no_accident(now):
            raise NotPermitted(
                "server key mismatch: the process at this address does not have the key of "
                f"{self.directory.name}, or does not know this client's key",
                where=self.address,
                hint=f"dlctl status -j {self.directory.name}",
            )

    def _note_handshake(self, event: int, value: int, now: float) -> None:
        from zmq import Event

        from dlctl.roles.protocol.authz import COME_LATER

        is_denied = event == Event.HANDSHAKE_FAILED_AUTH
        self.is_put_off = is_denied and value == COME_LATER
        if event == Event.HANDSHAKE_SUCCEEDED or self.is_put_off:
            self.refusals = None
        else:
            is_final = is_denied or event == Event.HANDSHAKE_FAILED_PROTOCOL
            since = self.refusals.since if self.refusals is not None else now
            self.refusals = _Refusals(since, now, is_final)

    def _connect(self, address: str, pid: int | None, key: str) -> None:
        import zmq

        if self.socket is not None:
            self.socket.disable_monitor()
            self.socket.close(linger=0)
        if self.monitor is not None:
            self.monitor.close()
        self.address, self.pid, self.key, self.answered = address, pid, key, False
        self.socket = self.monitor = None
        if address:
            self.socket = self.context.socket(zmq.DEALER)
            self.socket.setsockopt(zmq.IPV6, int("[" in address))
            self.socket.linger = 0
            if key:
                self._take_keys(self.socket, key)
            self.socket.connect(address)

    def _take_keys(self, socket: zmq.Socket[bytes], coordinator: str) -> None:
        """Set the client's keys, and accept only a server that has the coordinator's key."""
        import zmq

        mine = self._own_keys()
        socket.curve_serverkey = coordinator.encode()
        socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in mine)
        events = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        events |= zmq.Event.HANDSHAKE_FAILED_AUTH | zmq.Event.HANDSHAKE_SUCCEEDED
        self.monitor = socket.get_monitor_socket(events)
        self.refusals = None

    def _own_keys(self) -> keys.KeyPair:
        from dlctl.control import keys
        from dlctl.roles.protocol.authz import CLIENT

        return keys.CurveKeys(keys.read(self.directory)).pair(CLIENT)

    def _send(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        from dlctl.wire import codec

        try:
            socket.send_multipart(codec.encode(self.request), zmq.NOBLOCK)
        except zmq.Again:  # Not connected yet; the next round resends.
            return

    def _receive(self, wait_s: float) -> Reply | None:
        """A reply to this request that arrives within `wait_s` seconds, or None."""
        from dlctl.wire import codec
        from dlctl.wire.messages import Reply

        if self.socket is None:
            time.sleep(max(wait_s, 0.0))
            return None
        deadline = time.monotonic() + wait_s
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            # A reply is so small that it is never sent in segments.
            message = codec.decode(self.socket.recv_multipart())
            if isinstance(message, Reply) and message.request == self.request.request:
                return message
        return None

    def _too_late(self, run: Result, waited_s: float) -> DlctlError:
        run_id, waited = self.directory.name, format_duration(waited_s)
        if self.answered:
            return TimedOut(
                f'"{self.request.verb}" was not done after {waited}; the coordinator of {run_id} '
                "continues with it",
                hint=f"dlctl status -j {run_id}",
            )
        if not self.address:
            return Unreachable(
                f"the coordinator of {run_id} has no control address yet "
                f"(state: {run.get('state', 'unknown')}); waited {waited}",
                hint=f"dlctl logs coordinator -j {run_id}",
            )
        return self._not_admitted() or unresponsive.mute(self.directory, run, waited, self.address)

    def _not_admitted(self) -> Unreachable | None:
        """The error if the coordinator does not admit this client now."""
        if not self.is_put_off:
            return None
        return Unreachable(
            f"the coordinator of {self.directory.name} does not admit this client now: too many "
            "connections with this key, or the coordinator has not loaded its keys yet",
            where=self.address,
            hint="try again in a minute, with fewer commands at a time",
        )


class Gone(Unreachable):
    """The coordinator has exited, and no agent restarts it: no reply will ever arrive."""


def _is_restarted(run: Result) -> bool:
    """Whether an agent is alive that restarts the coordinator."""
    if run.get("state") in database.ENDED:
        return False
    return unresponsive.has_agent(run["daemons"])


def _gone(directory: Path, run: Result) -> Gone:
    return Gone(
        f"the coordinator of {directory.name} is gone (pid {run['pid']}); "
        f"its last state was {run.get('state', 'unknown')}",
        where=str(directory),
        hint=hints.either(
            f"dlctl recover -j {directory.name}", f"dlctl logs coordinator -j {directory.name}"
        ),
    )
