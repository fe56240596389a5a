"""A control socket that answers what a test says: the coordinator's side of `dlctl.client`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from dlctl import wire
from dlctl.messages import Reply, Request

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
            request = wire.decode(frames)
            heard.append(request)
            for reply in answer(request, len(heard)):
                frames = wire.encode(reply) if isinstance(reply, Reply) else reply
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


def done(request: Request, **result) -> Reply:
    return Reply(request.request, True, "", result)
