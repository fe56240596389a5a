"""Which addresses libzmq has to take as those of IPv6."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from dlctl.util import ip_versions

KNOWN = {
    "both": (socket.AF_INET6, socket.AF_INET),
    "old": (socket.AF_INET,),
    "new.default.svc": (socket.AF_INET6,),
}


@pytest.mark.parametrize(
    ("address", "is_v6"),
    [
        ("tcp://[::1]:7000", True),
        ("tcp://[fd00::2]:*", True),
        ("tcp://127.0.0.1:7000", False),
        ("tcp://new.default.svc:7100", True),
        ("tcp://both:7100", False),
        ("tcp://old:7100", False),
        ("tcp://nobody:7100", False),
        ("tcp://a..b:7100", False),
        ("ipc:///run/new.default.svc", False),
    ],
)
def test_a_name_is_of_ipv6_if_it_has_nothing_else(
    monkeypatch: pytest.MonkeyPatch, address: str, is_v6: bool
) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        if host not in KNOWN:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(family, 0, 0, "", ("", port)) for family in KNOWN[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert ip_versions.is_v6(address) == is_v6
