"""Who may connect: libzmq asks for every new connection whether its key is welcome (ZAP, RFC 27).

A thread of its own answers, so that a busy daemon does not keep anybody waiting. Without an answer
nobody gets in (`ZAP_ENFORCE_DOMAIN`); so if this thread ended, the daemon has to end, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping

import zmq
from zmq.utils import z85

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"dlctl"
STOP = "inproc://gatekeeper-stop"
VERSION = b"1.0"
QUIET_S = 60.0
"""Between two lines in the log about one source."""
SOURCES_MAX = 256

log = logging.getLogger(__name__)


class Gatekeeper:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.refused = 0
        """Connections that were not let in."""
        self._names: Mapping[bytes, bytes] = {}
        self._said: dict[str, float] = {}
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(ADDRESS)
        self._stopped = context.socket(zmq.PAIR)
        self._stopped.bind(STOP)
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect(STOP)
        self._thread = threading.Thread(target=self._serve, name="gatekeeper", daemon=True)
        self._thread.start()

    def admit(self, names: Mapping[str, str]) -> None:
        """From now on only these may connect: public key as text -> name. Safe from any thread."""
        self._names = {z85.decode(key): name.encode() for key, name in names.items()}

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()
        for socket in (self._questions, self._stopped, self._stop):
            socket.close(linger=0)

    # ------------------------------------------------------------ in the thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                return
            # Only libzmq can ask here. Whatever goes wrong, the next one must get an answer.
            with contextlib.suppress(zmq.ZMQError):
                self._questions.send_multipart(self._answer(self._questions.recv_multipart()))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """RFC 27: version, request id, status, text, user id, metadata."""
        request = question[1] if len(question) > 1 else b""
        name = self._name(question)
        if name is None:
            self.refused += 1
            self._tell(question[3].decode(errors="replace") if len(question) > 3 else "?")
            return [VERSION, request, b"400", b"unknown key", b"", b""]
        return [VERSION, request, b"200", b"OK", name, b""]

    def _name(self, question: list[bytes]) -> bytes | None:
        match question:
            case [_, _, domain, _, _, b"CURVE", key] if domain == DOMAIN:
                return self._names.get(key)
        return None

    def _tell(self, source: str) -> None:
        """At most once a minute for each source: whoever knocks must not fill the disk."""
        now = time.monotonic()
        if now - self._said.get(source, -QUIET_S) < QUIET_S:
            return
        if len(self._said) >= SOURCES_MAX:
            self._said.clear()
        self._said[source] = now
        log.warning("refused a connection from %s: its key is not known here", source)
