"""The events of a socket, which libzmq sends through a monitor socket.

At the high-water mark of the monitor, libzmq's I/O thread blocks: then nothing is sent or received,
and closing the socket deadlocks. A daemon reads events between two updates, which may take a
second. So the queue has no limit: an event has about a hundred bytes, and connections are limited
(`connection_limit`).
"""

from __future__ import annotations

import struct

import zmq

Socket = zmq.Socket[bytes]


def monitor(socket: Socket, events: int) -> Socket:
    """A socket that receives `events` of another one, until `stop`."""
    place = f"inproc://monitor-{socket.FD}"
    socket.monitor(place, events)
    reader: Socket = socket.context.socket(zmq.PAIR)
    reader.setsockopt(zmq.LINGER, 0)
    reader.setsockopt(zmq.RCVHWM, 0)
    reader.connect(place)
    return reader


def receive(reader: Socket) -> tuple[int, int]:
    """The next event and its value (a file descriptor, an errno, milliseconds). Raises zmq.Again.

    pyzmq's own function would import asyncio and ssl at each start of each daemon.
    """
    event, value = struct.unpack("=Hi", reader.recv_multipart(zmq.NOBLOCK)[0])
    return event, value


def stop(socket: Socket, reader: Socket) -> None:
    """Stop watching `socket` for events."""
    socket.disable_monitor()
    reader.close()
