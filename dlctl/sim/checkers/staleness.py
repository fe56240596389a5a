"""The reported staleness agrees with the history of the shard's versions."""

from __future__ import annotations

from collections import defaultdict

from dlctl.roles.protocol.effects import Compute
from dlctl.roles.protocol.loop_effects import LendModel
from dlctl.sim.checkers.base import Checker
from dlctl.sim.checkers.book import Book, PushKey
from dlctl.sim.checkers.versions import Versions
from dlctl.sim.process import Process
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import APPLIED, DUPLICATE, Array


def _gradients(values: Array) -> int:
    """The number of gradients in some parameters of a ledger; a local step alone moves less."""
    return int((values > 0.5).sum())


class StalenessChecker(Checker):
    """For methods that apply at once. It does not trust the versions that a daemon states: on the
    servers' side it counts applied pushes, on the workers' side it derives the number of gradients
    from the parameters.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self._parameters = Versions()
        self.reported: list[int] = []
        """The reported staleness of every applied push, in order."""
        self._applied: defaultdict[int, set[PushKey]] = defaultdict(set)
        self._known: set[Process] = set()
        self._before: dict[int, int] = {}
        """Shard -> its version when the run began (it may resume from a checkpoint)."""
        self._versions: defaultdict[int, dict[int, set[int]]] = defaultdict(dict)
        """Shard -> gradients in its parameters -> versions with so many."""
        self._bases: dict[Process, dict[int, set[int]]] = {}
        """Worker -> shard -> the versions that its last gradient but one may be of."""
        self._asked: dict[Process, tuple[float, dict[int, set[int]]]] = {}
        """Worker -> when it has begun its current gradient, and the same for that."""
        self._pushed: set[PushKey] = set()

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        self._parameters.on_message(process)
        serving = getattr(process.machine, "serving", None)
        if serving is not None and serving.initialised:
            self._meet(process, serving.index)

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Compute | LendModel):
            self._on_compute(process)
        if not isinstance(effect, Send) or getattr(effect.message, "table", None):
            return  # Only the parameters have a bound.
        match effect.message:
            case m.Joined(shard) | m.Parameters(shard) | m.SparseParameters(shard) | m.Ack(shard):
                self._meet(process, shard)
        match effect.message:
            case m.Parameters() | m.SparseParameters():
                self._on_parameters(process, effect.message)
            case m.Push():
                self._on_push(process, str(effect.peer), effect.message)
            case m.Ack(outcome=outcome) if outcome in (APPLIED, DUPLICATE):
                key = self.book.key(process, effect.peer, effect.message)
                if key is not None:
                    self._on_ack(key, effect.message)

    def _meet(self, server: Process, shard: int) -> None:
        """A new server may have applied pushes that its predecessor could not acknowledge."""
        if server in self._known:
            return
        self._known.add(server)
        held = server.machine.serving.shard  # type: ignore[attr-defined]
        self._before.setdefault(shard, held.version)
        for key, cells in self.book.cells.items():
            if key.shard == shard and len(cells) and held.w[cells].all():
                self._applied[shard].add(key)

    def _version(self, shard: int) -> int:
        return self._before[shard] + len(self._applied[shard])

    # ------------------------------------------------------------ servers

    def _on_parameters(self, server: Process, message: m.Parameters | m.SparseParameters) -> None:
        if message.version != self._version(message.shard):
            raise self.broken(
                f"{server} says version {message.version}, and has applied "
                f"{self._version(message.shard)} pushes"
            )
        of_shard = self._versions[message.shard]
        w = self._parameters.of(server, message.version).exact
        of_shard.setdefault(_gradients(w), set()).add(message.version)

    def _on_ack(self, key: PushKey, ack: m.Ack) -> None:
        if key in self._applied[key.shard] or not len(self.book.cells[key]):
            return  # An empty push, such as that of a step without data, is no new version.
        staleness = max(0, self._version(key.shard) - self.book.bases[key])
        self._applied[key.shard].add(key)
        if ack.outcome != APPLIED:
            return
        self.reported.append(ack.staleness)
        if ack.staleness != staleness:
            raise self.broken(f"{key}: {ack.staleness} is reported, and it is {staleness}")

    # ------------------------------------------------------------ workers

    def _on_compute(self, worker: Process) -> None:
        training = worker.machine.training  # type: ignore[attr-defined]
        parameters = training.side.parameters
        held = {c.shard: _gradients(parameters[c.lo : c.hi]) for c in training.links.channels}
        bases = {shard: self._versions[shard].get(number, set()) for shard, number in held.items()}
        self._bases[worker] = self._asked[worker][1] if worker in self._asked else {}
        self._asked[worker] = (worker.timeline.now, bases)

    def _on_push(self, worker: Process, peer: str, push: m.Push) -> None:
        key = PushKey(push.slot, push.term, int(peer.rpartition("-")[2]), push.seq)
        if key in self._pushed:
            return
        self._pushed.add(key)
        if worker not in self._asked:
            return  # It has computed nothing, and says that it is idle.
        begun_s, newest = self._asked[worker]
        # Effects of one event: the next gradient is begun, then the last one is pushed.
        bases = (self._bases if begun_s == worker.timeline.now else {worker: newest})[worker]
        bases_here = bases.get(key.shard, set())
        if push.base_version not in bases_here:
            raise self.broken(
                f"{key} says that its newest gradient is of version {push.base_version}, and the "
                f"parameters were those of {sorted(bases_here)}"
            )
