"""Finds out, before anything is started, whether a run lets a guest in; and if not, why."""

from __future__ import annotations

import time
from contextlib import closing

import zmq
from zmq.utils.monitor import recv_monitor_message

from dlctl.control.invitation import ASK, InvitationFile, refusal
from dlctl.errors import NotPermitted, Unreachable
from dlctl.roles.protocol.authz import COME_LATER

ANSWER_S = 15.0
"""How long the address may take to answer."""
AGAIN_S = 0.2
"""Before the next try, where a run lets nobody in yet."""
FOREIGN_S = 3.0
"""How long only failed handshakes may follow on each other."""


class Foreign(NotPermitted):
    exit_code = 10


def knock(made: InvitationFile, address: str) -> None:
    """Raises NotPermitted, or Expired, for an invitation that the run does not accept (any more),
    Foreign for one of another run, and Unreachable if there is no run at the address.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with closing(context.socket(zmq.DEALER)) as socket:
            _knock(socket, made, address)
    finally:
        context.destroy(linger=0)


def _knock(socket: zmq.Socket[bytes], made: InvitationFile, address: str) -> None:
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.curve_serverkey = made.coordinator.encode()
    socket.curve_publickey = zmq.curve_public(made.secret.encode())
    socket.curve_secretkey = made.secret.encode()
    monitor = socket.get_monitor_socket()
    socket.connect(address)
    until, failed_since, is_connected = time.monotonic() + ANSWER_S, 0.0, False
    is_put_off = False
    try:
        while (now := time.monotonic()) < until:
            if failed_since and now - failed_since > FOREIGN_S:
                break
            if not monitor.poll(200):
                continue
            news = recv_monitor_message(monitor)
            event, value = int(news["event"]), int(news["value"])
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return
            if event == zmq.Event.HANDSHAKE_FAILED_AUTH and value == COME_LATER:
                is_put_off = True  # By the run: it starts, and does not know yet whom it admits.
                time.sleep(AGAIN_S)
                socket.disconnect(address)
                socket.connect(address)  # libzmq does not.
                continue
            if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                raise refusal(made, address, time.time())
            is_connected |= event == zmq.Event.CONNECTED
            if event in (
                zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
                zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
                zmq.Event.HANDSHAKE_FAILED_AUTH,
            ):
                failed_since = failed_since or now
    finally:
        socket.disable_monitor()
        monitor.close()
    if is_put_off:
        raise Unreachable(
            "the run is about to start, or this invitation connects too often: it lets nobody in",
            where=address,
            hint="try again in a minute",
        )
    if is_connected:
        raise Foreign(
            f"the process at this address is not {made.run}, or has other keys",
            where=address,
            hint=f"check the address, or {ASK}",
        )
    raise Unreachable(
        "there is no run at this address, or it cannot be reached from here",
        where=address,
        hint="is the run live, and is this port open in its firewall? After a stop or restart of "
        f"the run, {ASK}",
    )
