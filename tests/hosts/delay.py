"""A cable with a delay: `delay LINK TAP DELAY_MS`, until its standard input is closed.

What comes in at one end goes out at the other some milliseconds later, in the same order. LINK is
there already; TAP is made, and gone when this process is. The kernel could do this better (netem),
but not every kernel has it.

Packets are taken together with what the kernel notes about them (struct virtio_net_hdr): it has not
computed their checksums, and hands over up to 64 KiB at once, which makes Python fast enough.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")
TUN = "/dev/net/tun"
ANY_PROTOCOL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
OFFLOADS = 0x1 | 0x2 | 0x4  # checksums, and TCP over IPv4 and IPv6 in large pieces
FRAME_BYTES_MAX = 1 << 17
UNDERWAY_BYTES_MAX = 64 << 20
AT_ONCE = 64
LOST = (errno.EAGAIN, errno.ENOBUFS, errno.ENETDOWN, errno.ENXIO, errno.EIO)
"""A queue that is full, or an end that is not there: cables do not tell."""


def open_link(name: str) -> int:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    link.bind((name, ANY_PROTOCOL))
    return link.detach()


def open_tap(name: str) -> int:
    tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, TUNSETOFFLOAD, OFFLOADS)
    return tap


class Direction:
    """From one end to the other."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self._target, self._delay_s = source, target, delay_s
        self._underway: deque[tuple[float, bytes]] = deque()
        self._underway_bytes = 0

    def take(self) -> None:
        for _ in range(AT_ONCE):
            frame = unless_lost(partial(os.read, self.source, FRAME_BYTES_MAX))
            if not frame:
                return
            if self._underway_bytes + len(frame) <= UNDERWAY_BYTES_MAX:
                self._underway.append((time.monotonic() + self._delay_s, frame))
                self._underway_bytes += len(frame)

    def give(self) -> None:
        """Whatever has been on its way for long enough."""
        while self._underway and self._underway[0][0] <= time.monotonic():
            _, frame = self._underway.popleft()
            self._underway_bytes -= len(frame)
            unless_lost(partial(os.write, self._target, frame))

    def wait_s(self) -> float | None:
        """Until the next one is due; None: there is none."""
        if not self._underway:
            return None
        return max(0.0, self._underway[0][0] - time.monotonic())


def unless_lost(act: Callable[[], Result]) -> Result | None:
    try:
        return act()
    except OSError as error:
        if error.errno not in LOST:
            raise
        return None


def main() -> None:
    link, tap = open_link(sys.argv[1]), open_tap(sys.argv[2])
    delay_s = float(sys.argv[3]) / 1000
    print("up", flush=True)
    ways = [Direction(link, tap, delay_s), Direction(tap, link, delay_s)]
    while True:
        waits_s = [wait_s for way in ways if (wait_s := way.wait_s()) is not None]
        ready, _, _ = select.select([0, link, tap], [], [], min(waits_s, default=None))
        if 0 in ready:
            return
        for way in ways:
            if way.source in ready:
                way.take()
            way.give()


if __name__ == "__main__":
    main()
