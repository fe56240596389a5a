"""Answers HTTP requests for metrics: one thread for all clients, each with a deadline.

The library parses a request and makes its answer; its own servers have a thread per client, or
serve one after another, and no deadline for a request as a whole.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import Future
from io import BytesIO
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

log = logging.getLogger("dlctl")
REQUEST_S = 5.0
"""Time from the connection of a client to the end of its answer."""
CLIENTS_MAX = 64
"""Beyond that the oldest one is dropped: a scrape takes milliseconds."""
HEAD_BYTES_MAX = 16 * 1024
"""The largest head of an HTTP request."""
CLOSE_S = 1.0
"""The longest that `close` waits for the thread."""


class _OfBytes(MetricsHandler):
    """Reads a request from bytes, and writes its answer into others: `wfile`."""

    def setup(self) -> None:
        self.rfile, self.wfile = BytesIO(self.request), BytesIO()

    def finish(self) -> None: ...


class MetricsServer:
    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        """Listen at an address. Raises OSError."""
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(place, family=family, dualstack_ipv6=both)
        self._handler: Any = _OfBytes.factory(registry)
        self._closed: Future[None] = Future()
        self._clients: dict[asyncio.Task[Any], None] = {}
        """The oldest one first."""
        self._thread = Thread(target=self._run, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set_result(None)
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._client, sock=self._listener, limit=HEAD_BYTES_MAX)
        await asyncio.wrap_future(self._closed)
        server.close()  # `asyncio.run` then cancels what is left of the clients.

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= CLIENTS_MAX:
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = None
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(self._answer(await _head(reader)))
                writer.close()
                await writer.wait_closed()
        except (OSError, ValueError) as error:  # Also the deadline.
            log.debug("a Prometheus client is dropped: %s", str(error) or type(error).__name__)
        finally:
            self._clients.pop(task, None)
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        answered: BytesIO = self._handler(head, ("", 0), None).wfile
        return answered.getvalue()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """A request up to its empty line, or to the end of what the client sends. Raises ValueError if
    a line is too long.
    """
    head = b""
    while len(head) < HEAD_BYTES_MAX and (line := await reader.readline()):
        head += line
        if not line.strip():
            break
    return head
