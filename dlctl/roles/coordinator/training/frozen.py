"""The run's frozen parameters: which worker's values are used, and the file that stores them.

The first worker that has built the model writes its values to a file. Only when that file is in the
run directory do workers receive the servers' addresses: from then on a worker that has built other
values can load these, even if the first worker dies. A run that resumes from a checkpoint has the
file already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from dlctl.errors import DlctlError
from dlctl.model import frozen
from dlctl.model.flat import Layout
from dlctl.records.memory import Entry, Memory
from dlctl.roles.coordinator.members.membership import Daemon
from dlctl.roles.coordinator.records import Owner
from dlctl.roles.coordinator.run_state import CoordinatorPart
from dlctl.roles.protocol.files import Transfers, WantedFile
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer
from dlctl.wire.messages import Json


@dataclass(eq=False)
class FrozenParameters(CoordinatorPart, Owner):
    PERSISTED = frozenset({"part"})
    transfers: Transfers
    part: Json | None
    """{"file", "sha256", "nbytes", "digests"} of the file in the run directory; initially of the
    checkpoint that the run resumes from."""
    settled: Callable[[], None]
    """Called when the digests may be sent to workers."""
    _layout: Layout | None = field(default=None, init=False)
    _built: dict[str, bytes] = field(default_factory=dict, init=False)
    """Worker -> digests of the values that it has built."""
    _lacking: set[str] = field(default_factory=set, init=False)
    """Workers that lack weights: their values must not be used."""
    _writer: str = field(default="", init=False)
    """The worker that writes the file."""
    _file: str = field(default="", init=False)

    @property
    def digests(self) -> bytes:
        """Digests of the run's values; b"" until they are settled, or if there are none."""
        return bytes.fromhex(self.part["digests"]) if self.part else b""

    def to_send(self) -> bytes | None:
        """The digests to send to workers; None: not settled yet."""
        are_some = self._layout is not None and bool(frozen.entries(self._layout))
        return None if self.part is None and are_some else self.digests

    def memory(self) -> Iterator[Entry]:
        yield Entry("frozen", self.part)

    def recall(self, memory: Memory, now: float) -> None:
        self.part = memory.value("frozen") or self.part
        if layout := memory.value("layout"):
            self._layout = Layout.from_rows(layout)

    def on_model(self, worker: Daemon, layout: Layout, message: m.ModelReady, now: float) -> None:
        """Raises DlctlError if the digests do not fit the layout."""
        digests = message.frozen
        if not frozen.fits(layout, digests) or (self.part and len(self.digests) != len(digests)):
            raise DlctlError(
                f"{worker.name} has not reported its frozen parameters",
                hint="all hosts of a run need the same version of dlctl",
            )
        self._layout = layout
        is_news = worker.name not in self._built
        self._built[worker.name] = digests
        if message.lacks_weights:
            self._lacking.add(worker.name)
        if self.part is None:
            self._have_written(now)
        elif is_news:
            self._note_other(worker.name)

    def _note_other(self, name: str) -> None:
        assert self._layout is not None
        if others := frozen.differing(self._built[name], self.digests):
            places = frozen.plan(self._layout).places
            nbytes = sum(places[n][1] - places[n][0] for n in others)
            text = (
                f"{name} has built other values for {len(others)} of {len(places)} frozen "
                f"parameters: it loads the run's, {nbytes / 1e6:.1f} MB"
            )
            self.context.event("frozen", name, text)

    def _have_written(self, now: float) -> None:
        """Ask a worker to write the file, unless one is writing it or has written it."""
        if self._writer or self.part is not None or self._layout is None:
            return
        able = (name for name, own in self._built.items() if own and name not in self._lacking)
        if writer := next(able, ""):
            self._writer = writer
            self._file = frozen.run_file(self._layout, self._built[self._writer])
            key = ("frozen", self._writer)
            self.context.ask(key, self._writer, m.KeepFrozen(self._file), now)

    def on_kept(self, peer: Peer, message: m.FrozenKept, now: float) -> None:
        key = ("frozen", message.name)
        if self.context.retries.message(key) != m.KeepFrozen(message.file):
            return  # It is repeated, or of a process that has died.
        self.context.retries.done(key, now)
        agent = self.members.daemons[message.name].agent
        if message.error:
            self._fail(message.error, now)
        elif agent == HOME_AGENT:
            self._on_there(message, agent, "", now)
        else:
            wanted = WantedFile(message.file, message.nbytes, message.sha256)
            self.transfers.fetch(agent, wanted, partial(self._on_there, message, agent), now)

    def _on_there(self, message: m.FrozenKept, agent: str, error: str, now: float) -> None:
        if error:
            # The workers of a host that is lost are about to be given up, too.
            there = self.members.get(agent)
            if there is not None and there.alive:
                self._fail(f"the file was not received from {message.name}: {error}", now)
            return
        if agent != HOME_AGENT:
            self.context.send(agent, m.FileTaken(message.file))
        self.part = {
            "file": message.file.rpartition("/")[2],
            "sha256": message.sha256,
            "nbytes": message.nbytes,
            "digests": self._built[message.name].hex(),
        }
        text = f"frozen parameters, {message.nbytes / 1e6:.1f} MB, are stored once for the run"
        self.context.event("frozen", message.name, text)
        for name in self._built:
            self._note_other(name)
        self.settled()

    def _fail(self, error: str, now: float) -> None:
        self.control.end("failed", f"cannot keep the frozen parameters of the model: {error}", now)

    def on_gone(self, name: str, now: float) -> None:
        """A worker has died: the file that it was writing may be truncated."""
        self._built.pop(name, None)
        self._lacking.discard(name)
        if name == self._writer:
            self.context.retries.drop(("frozen", name))
            self.transfers.cancel(self._file)
            self._writer = ""
            self._have_written(now)
