"""Whether an address is one of IPv6: libzmq has to be told before it binds or connects."""

from __future__ import annotations

import ipaddress
import socket


def is_v6(address: str) -> bool:
    """For "tcp://HOST:PORT". A name is of IPv6 if it has no address of IPv4, as in a cluster with
    IPv6 alone; one that cannot be resolved now is not.
    """
    if not address.startswith("tcp://"):
        return False
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if host.startswith("["):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _has_v6_alone(host)
    return False  # One of IPv6 is in brackets.


def _has_v6_alone(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    families = {family for family, *_ in found}
    return socket.AF_INET6 in families and socket.AF_INET not in families
