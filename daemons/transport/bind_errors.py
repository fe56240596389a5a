"""Errors for addresses that cannot be bound."""

from __future__ import annotations

import errno
import shlex

import zmq

from dlctl.errors import DlctlError

NOT_FREE = "choose another port in [network], or 0 for any free one"
NOT_OURS = (
    "no interface of this machine has this address: correct data and bind of this host in "
    "[[hosts]], and address in [network]; ip -brief address shows those that it has"
)


def cannot_listen(address: str, error: zmq.ZMQError) -> DlctlError:
    """Names the address and, if known, the process that holds it."""
    from daemons.node.owners import owner_of

    port, holder = address.rpartition(":")[2], ""
    if address.startswith("tcp:") and port.isdigit() and (owner := owner_of(int(port))):
        command = " ".join(shlex.join(owner["command"]).split())
        holder = f" (held by pid {owner['pid']}, {command:.100})"
    return DlctlError(
        f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}{holder}",
        hint=NOT_OURS if error.errno == errno.EADDRNOTAVAIL else NOT_FREE,
    )
