"""Errors for addresses that cannot be bound."""

from __future__ import annotations

import errno

import zmq

from dlctl.errors import DlctlError

NOT_FREE = "choose another port in [network], or 0 for any free one"
NOT_OURS = (
    "no interface of this machine has this address: correct data and bind of this host in "
    "[[hosts]], and address in [network]; ip -brief address shows those that it has"
)


def cannot_listen(address: str, error: zmq.ZMQError) -> DlctlError:
    """Names the address and, if known, the process that holds it."""
    return DlctlError(
        f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}{_holder(address)}",
        hint=NOT_OURS if error.errno == errno.EADDRNOTAVAIL else NOT_FREE,
    )


def _holder(address: str) -> str:
    """ " (held by pid 123, nginx)" for a TCP port, if this user may see it."""
    import psutil

    port = address.rpartition(":")[2]
    if not address.startswith("tcp:") or not port.isdigit():
        return ""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == int(port):
                name = psutil.Process(connection.pid).name() if connection.pid else "unknown"
                return f" (held by pid {connection.pid}, {name})"
    except (psutil.Error, OSError):
        return ""
    return ""
