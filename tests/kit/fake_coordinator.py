"""A control socket that answers what a test says: the coordinator's side of `dlctl.client`, without
keys, and with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from daemons.transport.sockets import Transport
from dlctl.control.keys import CurveKeys
from dlctl.wire import codec
from dlctl.wire.messages import Reply, Request

Replies = list[Reply | list[bytes]]


@contextmanager
def coordinator(
    answer: Callable[[Request, int], list[Reply]],
) -> Iterator[tuple[str, list[Request]]]:
    """A control socket; `answer(request, how often it was heard)` says what it replies."""
    heard: list[Request] = []
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    end = context.socket(zmq.PAIR)
    end.bind("inproc://end")

    def serve() -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(end, zmq.POLLIN)
        while end not in dict(poller.poll()):
            peer, *frames = router.recv_multipart()
            request = codec.decode(frames)
            heard.append(request)
            for reply in answer(request, len(heard)):
                frames = codec.encode(reply) if isinstance(reply, Reply) else reply
                router.send_multipart([peer, *frames])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}", heard
    finally:
        with context.socket(zmq.PAIR) as stop:
            stop.connect("inproc://end")
            stop.send(b"")
            thread.join()
        context.destroy(linger=0)


RUN_KEY = b"a" * 32
RING = CurveKeys(RUN_KEY)


@contextmanager
def coordinator_with_keys(
    answer: Callable[[Request], list[Reply]], *names: str
) -> Iterator[tuple[str, Transport]]:
    """One that lets these in; no names: it was not told yet who may come."""
    listener = Transport(zmq.Poller(), RING.secret("coordinator"))
    address = listener.listen("tcp://127.0.0.1:*")
    if names:
        listener.admit({RING.public(name): name for name in names})
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            for source, _ in listener.poller.poll(50):
                for asked in listener.receive(source):
                    for reply in answer(asked.message):
                        listener.send(asked.peer, reply)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address, listener
    finally:
        is_over.set()
        thread.join()
        listener.close()


def done(request: Request, **result) -> Reply:
    return Reply(request.request, True, "", result)
