"""Authentication of connections: libzmq asks for every new one whether its key is known (ZAP, RFC
27).

A separate thread answers, so that a busy daemon does not delay connections. Without an answer no
connection is admitted (`ZAP_ENFORCE_DOMAIN`); so the daemon must exit if this thread ends.

A connection may choose its routing id, also one that libzmq will later generate for another
connection; then libzmq aborts the process. These 32-bit ids are secret, but a client that connects
often enough hits one. So connections per key are rate-limited.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping

import zmq
from zmq.utils import z85

from dlctl.roles.protocol.authz import COME_LATER

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"dlctl"
VERSION = b"1.0"
WELCOME, UNKNOWN = (b"200", b"OK"), (b"400", b"unknown key")
LATER = (str(COME_LATER).encode(), b"later")
UNDECIDED_S = 2.0
"""How long a connection waits while the admitted keys are not set: less than a handshake may take.
"""
COMINGS_MAX, COMINGS_PER_S = 256.0, 10.0
"""Connections that one key may open: as a burst, and per second. A correct client needs a few."""
QUIET_S = 60.0
"""Interval between two log lines about one source."""
SOURCES_MAX = 256

log = logging.getLogger(__name__)


class Gatekeeper:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.refused = 0
        """The number of refused connections."""
        self._names: Mapping[bytes, bytes] | None = None
        """Public key -> name; None: not set yet."""
        self.decided = threading.Event()
        """`_names` is set, or the context is being terminated, which ends the thread."""
        self._left: dict[bytes, tuple[float, float]] = {}
        """Name -> (connections left, at this time): a token bucket."""
        self._warned_at: dict[str, float] = {}
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(ADDRESS)
        self.thread = threading.Thread(target=self._serve, name="gatekeeper", daemon=True)
        self.thread.start()

    def admit(self, names: Mapping[str, str]) -> None:
        """Set who may connect from now on: public key as text -> name. Thread-safe."""
        self._names = {z85.decode(key): name.encode() for key, name in names.items()}
        self.decided.set()

    # ------------------------------------------------------------ in the thread

    def _serve(self) -> None:
        with self._questions, contextlib.suppress(zmq.ContextTerminated):
            # A connection that arrives before the keys are set is admitted then, without a retry.
            while not self.decided.wait(UNDECIDED_S):
                while self._questions.poll(0) and not self.decided.is_set():
                    self._answer_next()
            while True:
                self._answer_next()

    def _answer_next(self) -> None:
        self._questions.send_multipart(self._answer(self._questions.recv_multipart()))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """RFC 27: version, request id, status, text, user id, metadata."""
        # Only listeners with CURVE keys and `DOMAIN` ask; another question would end this thread.
        _, request, _, address, _, _, key = question
        names = self._names
        name = names.get(key) if names is not None else None
        if names is None:
            status = LATER
        elif name is None:
            status, source = UNKNOWN, address.decode(errors="replace")
            self._warn(source, f"refused a connection from {source}: unknown key")
        elif not self._takes(name, time.monotonic()):
            status = LATER
            who = name.decode()
            self._warn(who, f"refused a connection of {who}: it connects too often")
        else:
            return [VERSION, request, *WELCOME, name, b""]
        self.refused += 1
        return [VERSION, request, *status, b"", b""]

    def _takes(self, name: bytes, now: float) -> bool:
        """Count a connection with this name's key; False if it exceeds the limit."""
        left, at = self._left.get(name, (COMINGS_MAX, now))
        left = min(COMINGS_MAX, left + (now - at) * COMINGS_PER_S)
        is_taken = left >= 1.0
        self._left[name] = (left - is_taken, now)
        return is_taken

    def _warn(self, source: str, text: str) -> None:
        """Log at most once per `QUIET_S` for each source: failing connections must not fill the
        disk.
        """
        now = time.monotonic()
        if now - self._warned_at.get(source, -QUIET_S) < QUIET_S:
            return
        if len(self._warned_at) >= SOURCES_MAX:
            self._warned_at.clear()
        self._warned_at[source] = now
        log.warning("%s", text)
