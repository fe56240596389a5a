"""The events of a socket, as libzmq tells them through another one.

libzmq's own thread waits for room where too many events are unread; while it waits nothing is sent
or received, and whoever closes the socket meanwhile waits for ever. A daemon reads them between two
updates, which may take a second, so here none is too many: an event has about a hundred bytes, and
connections are limited (`crowd`).
"""

from __future__ import annotations

import struct

import zmq

Socket = zmq.Socket[bytes]


def monitor(socket: Socket, events: int) -> Socket:
    """A socket from which `events` of another one come, until `stop`."""
    place = f"inproc://monitor-{socket.FD}"
    socket.monitor(place, events)
    reader: Socket = socket.context.socket(zmq.PAIR)
    reader.setsockopt(zmq.LINGER, 0)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(place)
    return reader


def receive(reader: Socket) -> tuple[int, int]:
    """The next event and its value (a file descriptor, an errno, milliseconds).

    pyzmq's own function for it brings asyncio and ssl with it, at each start of each daemon.
    """
    event, value = struct.unpack("=Hi", reader.recv_multipart()[0])
    return event, value


def stop(socket: Socket, reader: Socket) -> None:
    """No more events of `socket`."""
    socket.disable_monitor()
    reader.close()
