"""The listening end of a measurement: at exactly the address that a daemon would use.

A connection has to start with the token of this session, which was sent over standard input; any
other connection is closed without an answer. A listener closes after a minute, or with its process.
"""

from __future__ import annotations

import errno
import hmac
import re
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from daemons.node import flood
from daemons.node.requests import Request, field, natural
from daemons.transport.owners import owner_of
from dlctl.errors import UsageError
from dlctl.job import config
from dlctl.launch import addresses

LIFE_S = 60.0
FLOOD_S_MAX = 2.0
TOKEN_S = 2.0
CONNECTIONS_MAX = 8
_TOKEN = re.compile(rf"[0-9a-f]{{{flood.TOKEN_BYTES}}}")
KINDS = {
    errno.EADDRINUSE: "taken",
    errno.EADDRNOTAVAIL: "not ours",
    errno.EACCES: "not permitted",
}


class Listeners:
    """All listeners of this process."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._token = b""
        self._until = 0.0

    def listen(self, request: Request) -> dict[str, Any]:
        """{places: [{name, address, port, told}, or {name, address, port, kind, words, owner}]}.

        `bind` and `data` are those of the host in the job file, `control` the coordinator's
        address, or "" to listen where the coordinator would; `ports`: daemon -> port, or 0.
        Raises UsageError, and DlctlError if the host's address cannot be determined.
        """
        token = field(request, "token", str)
        if not _TOKEN.fullmatch(token):
            raise UsageError("the token of the request is invalid")
        self._token, self._until = token.encode(), time.monotonic() + LIFE_S
        ssh, data, bind = (field(request, name, str) for name in ("ssh", "data", "bind"))
        host = config.Host(ssh=ssh, data=data, bind=bind)
        control, ports = field(request, "control", str), field(request, "ports", dict)
        return {"places": [self._place(host, n, natural(ports, n), control) for n in ports]}

    def _place(self, host: config.Host, name: str, port: int, control: str) -> dict[str, Any]:
        place = addresses.on_host(host, port, control)
        address = addresses.host_of(place.bind)
        found = {"name": name, "address": address, "port": port}
        is_v6 = ":" in address
        try:
            # As ZeroMQ does: a port with connections in TIME_WAIT is free, and "::" has both kinds.
            own = socket.create_server(
                (address, port),
                family=socket.AF_INET6 if is_v6 else socket.AF_INET,
                backlog=CONNECTIONS_MAX,
                dualstack_ipv6=is_v6 and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            kind = KINDS.get(error.errno or 0, "")
            owner = owner_of(port) if kind == "taken" else {}
            words = (error.strerror or "").partition(" (while ")[0]  # Python adds the address.
            return {**found, "kind": kind, "words": words, "owner": owner}
        number = own.getsockname()[1]
        threading.Thread(target=self._accept, args=(own,), daemon=True).start()
        return {**found, "port": number, "told": place.advertised or address}

    def _accept(self, own: socket.socket) -> None:
        with own, suppress(OSError):
            while (left_s := self._until - time.monotonic()) > 0:
                own.settimeout(left_s)
                connection, _ = own.accept()
                if self._free.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                flood.prepare(connection)
                connection.settimeout(TOKEN_S)
                token = flood.read_exactly(connection, flood.TOKEN_BYTES)
                if hmac.compare_digest(token, self._token):
                    connection.settimeout(flood.SILENT_S)
                    connection.sendall(flood.WELCOME)
                    self._answer(connection)
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket) -> None:
        while time.monotonic() < self._until and (word := connection.recv(1)):
            if word == flood.PING:
                connection.sendall(flood.PING)
            elif word == flood.FLOOD:
                arrived = flood.take_flood(connection)
                connection.sendall(flood.COUNTED.pack(*arrived))
                flood.send_flood(connection, min(arrived.took_ns / 1e9, FLOOD_S_MAX))
            else:
                return


listen = Listeners().listen
