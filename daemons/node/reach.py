"""The connecting end of a measurement: reachability, round trip and throughput."""

from __future__ import annotations

import errno
import socket
import statistics
import time
from typing import Any

from daemons.node import flood
from daemons.node.requests import Request, field, natural

CONNECT_S = 3.0
SIGN_S = 1.0
"""Time to wait for any answer from an address whose port is silent."""
PINGS = 9
FLOOD_S_MIN, FLOOD_S_MAX = 0.3, 1.5
ROUND_TRIPS = 10
"""Minimum duration of a flood, because of TCP slow start."""
SIGN_PORTS = (22, 9)
KINDS = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
    errno.ECONNRESET: "stranger",
}


def reach(request: Request) -> dict[str, Any]:
    """{reached: one result for each of `targets`, see below}"""
    return {"reached": [_reach(target) for target in field(request, "targets", list)]}


def _reach(target: Request) -> dict[str, Any]:
    """`target`: {address, port, token, is_measured}.

    {round_trip_s, up_bytes_per_s, down_bytes_per_s, from}, or {kind, words}: "refused", "no route",
    "silent" (no answer from this port, but from others of the address), "dark" (no answer from the
    address at all), "unknown name", "stranger" (another program answers).
    """
    address, port = field(target, "address", str), natural(target, "port")
    token = field(target, "token", str).encode()
    try:
        connection = socket.create_connection((address, port), CONNECT_S)
    except socket.gaierror as error:
        return {"kind": "unknown name", "words": str(error.strerror or error)}
    except TimeoutError:
        return _silent(address)
    except OSError as error:
        return {"kind": KINDS.get(error.errno or 0, "no route"), "words": str(error.strerror)}
    with connection:
        try:
            return _measure(connection, token, field(target, "is_measured", bool))
        except OSError as error:
            return {"kind": "stranger", "words": error.strerror or str(error)}


def _measure(connection: socket.socket, token: bytes, is_measured: bool) -> dict[str, Any]:
    flood.prepare(connection)
    connection.sendall(token)
    if flood.read_exactly(connection, 1) != flood.WELCOME:
        return {"kind": "stranger", "words": "it uses another protocol"}
    round_trip_s = statistics.median(_ping_s(connection) for _ in range(PINGS))
    found = {"round_trip_s": round_trip_s, "from": connection.getsockname()[0]}
    if not is_measured:
        return found
    for_s = min(FLOOD_S_MAX, max(FLOOD_S_MIN, ROUND_TRIPS * round_trip_s))
    connection.sendall(flood.FLOOD)
    flood.send_flood(connection, for_s)
    up = flood.Arrived(*flood.COUNTED.unpack(flood.read_exactly(connection, flood.COUNTED.size)))
    down = flood.take_flood(connection)
    return {**found, "up_bytes_per_s": up.bytes_per_s, "down_bytes_per_s": down.bytes_per_s}


def _ping_s(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(flood.PING)
    flood.read_exactly(connection, 1)
    return time.perf_counter() - began


def _silent(address: str) -> dict[str, Any]:
    """Why a port does not answer: it is blocked if another port of the host refuses or accepts."""
    for port in SIGN_PORTS:
        try:
            socket.create_connection((address, port), SIGN_S).close()
        except ConnectionRefusedError:
            pass
        except OSError:
            continue
        return {"kind": "silent", "words": f"port {port} of the same address answers"}
    return {"kind": "dark", "words": "no answer from this address"}
