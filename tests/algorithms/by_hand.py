"""Methods played by hand: their three sides, the real services of a worker, and the real shards.

There are no processes, no sockets and no time: a `Player` is the worker role's `Training`. Its
messages go straight to the shard sides of the method's tables and to other players, and its batches
come from the test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from builders import OWN_LR, identity, joined_tables, replica, training

from dlctl import registry
from dlctl.algorithms.base import (
    BatchRequest,
    Decision,
    Driving,
    Lead,
    Method,
    PushOutcome,
    ShardSide,
    Table,
    VectorRequest,
)
from dlctl.algorithms.engines import Operations, TwinPlace
from dlctl.algorithms.needs import Gradient, Need, NextBatch, NextData, Step, Write
from dlctl.algorithms.tables import optimizer_of, side_of
from dlctl.compress.base import Delta
from dlctl.compress.none import Dense
from dlctl.compress.plain import expand
from dlctl.model.flat import slice_bounds
from dlctl.model.vector import euclidean_norm
from dlctl.optim.base import Optimizer
from dlctl.optim.sgd import SGD
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import (
    Compute,
    Computed,
    EngineRan,
    ExchangeOwn,
    JoinGroup,
    Reduce,
    RunEngine,
    StepAlong,
)
from dlctl.roles.server.commits import Commits
from dlctl.roles.server.table_shard import TableShard
from dlctl.roles.server.vectors import ShardVectors
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.shards.base import Shard
from dlctl.shards.memory import in_memory
from dlctl.sim.group import LATENCY_S, GroupDriver, SimGroups
from dlctl.sim.objectives import LeastSquares, layout_of
from dlctl.wire import messages as m
from dlctl.wire.machine import Send
from dlctl.wire.messages import HELD, Array

Batch = tuple[NextBatch, Any]
"""What a replica is told of a batch, and what the test's gradient makes of it."""
GradientOf = Callable[[Array, Any], Step]
"""(parameters, the batch) -> its gradient."""
SHARD_TERM = 1
WORKERS = 4
"""That the job is said to have."""
Which = tuple[int, int, int, int]
"""(shard, slot, term, seq): one push."""


class OfTable:
    """All shards of one table, with a shard side on each."""

    def __init__(self, declared: Table, shards: list[Shard], sides: list[ShardSide]) -> None:
        self.declared = declared
        self.shards = shards
        self.sides = sides
        self.outcomes: defaultdict[Which, list[str]] = defaultdict(list)
        """What its shard side said became of each push."""

    def whole(self) -> Array:
        return np.concatenate([shard.w for shard in self.shards])


class Shards:
    """All shards of a method's tables; those of the parameters begin as `w` (float32[d])."""

    def __init__(
        self,
        algorithm: Method,
        w: Array,
        count: int,
        options: Any = None,
        optimizer: Callable[[], Optimizer] = lambda: SGD(SGD.Options(lr=0.1)),
    ) -> None:
        """optimizer: makes one for each shard."""
        self.size = w.size
        self.count = count if algorithm.shape.needs_servers else 0
        self.bounds = [slice_bounds(w.size, count, index) for index in range(self.count)]
        options = options if options is not None else algorithm.Options()
        self.tables: list[OfTable] = []
        self.numbers: dict[str, int] = {}
        """Table -> its number."""
        for table in algorithm.shape.tables_of(options) if self.count else ():
            self.numbers[table.name] = len(self.tables)
            size = table.size(layout_of(w.size))
            start = np.zeros(size, table.dtype) if self.tables else w.astype(np.float32)
            cuts = [slice_bounds(size, count, index) for index in range(count)]
            shards = []
            for lo, hi in cuts:
                rule = optimizer_of(table, algorithm, options, optimizer(), WORKERS)
                shards.append(in_memory(rule, start[lo:hi].copy()))
            sides = [side_of(table, algorithm, options, shard) for shard in shards]
            self.tables.append(OfTable(table, shards, sides))
        self.vectors = [self._vectors(index) for index in range(self.count)]
        self.groups = SimGroups(np.random.default_rng(0))
        self.memory = np.ones(w.size, np.float32)
        """The model of all replicas, if they share one."""
        self.players: dict[tuple[int, int], Player] = {}
        """(slot, term) -> whoever gets the answers."""
        self._number = 0
        self.lead = algorithm.lead(options)
        self.slots: frozenset[int] = frozenset()
        """Who takes part."""
        self.takes_time = False
        """A lead that wants to wait is left waiting. Else its time is over at once."""

    @property
    def shards(self) -> list[Shard]:
        """Of the parameters; likewise sides and outcomes."""
        return self.tables[0].shards if self.tables else []

    @property
    def sides(self) -> list[ShardSide]:
        return self.tables[0].sides if self.tables else []

    @property
    def outcomes(self) -> dict[Which, list[str]]:
        return self.tables[0].outcomes

    def members(self, slots: frozenset[int]) -> None:
        """These take part, all of them new."""
        self.slots = slots
        for side in (side for table in self.tables for side in table.sides):
            side.members(slots)
            for slot in sorted(slots):
                side.joined(slot)

    def whole(self, name: str = "w") -> Array:
        """A table, put together from its slices."""
        return self.tables[self.numbers[name]].whole()

    def put(self, name: str, values: Array) -> None:
        for shard, (lo, hi) in zip(
            self.tables[self.numbers[name]].shards, self.bounds, strict=True
        ):
            shard.w[:] = values[lo:hi]

    def _vectors(self, index: int) -> ShardVectors:
        context = Context(resend_s=1e6)
        of_server = [
            TableShard(
                context=context, commits=Commits(context), table=number, index=index,
                declared=self.tables[number].declared, term=SHARD_TERM, lo=0, hi=0,
                shard=self.tables[number].shards[index], side=self.tables[number].sides[index],
                compressor_name="none", compressor=Dense, push_norm_max=1e9,
                fetch_values="float32", step_samples=1024,
            )
            for number in self.numbers.values()
        ]  # fmt: skip
        return ShardVectors(of_server)

    def perform(self, request: VectorRequest) -> tuple[float, ...]:
        self._number += 1
        partials = [vectors.run(message_of(self._number, request)) for vectors in self.vectors]
        return tuple(map(sum, zip(*partials, strict=True)))

    def push(self, request: Write, values: Array, who: tuple[int, int, int]) -> None:
        """who: (slot, term, seq)."""
        for index in range(len(self.shards)):
            self.push_to(index, request, values, who)

    def push_to(self, index: int, request: Write, values: Array, who: tuple[int, int, int]) -> None:
        lo, hi = self.bounds[index]
        table = self.numbers[request.table]
        slot, term, seq = who
        packed = m.Packed("none", hi - lo, (values[lo:hi].copy(),))
        self.take(
            index,
            m.Push(
                slot, term, SHARD_TERM, seq, self.shards[index].version, 0, 0, request.samples,
                request.clock, packed, request.part, table,
            ),
        )  # fmt: skip

    def take(self, index: int, push: m.Push) -> None:
        """A push that is new, in order and sound, of all that the shard has."""
        table = self.tables[push.table]
        delta = expand(Dense, push.delta, push.delta.length)
        assert push.is_part or push.delta.length == table.shards[index].size
        if push.is_part:
            delta = Delta(delta.values, push.at + np.arange(delta.values.size))
        self._hear(index, push.table, table.sides[index].push(push, delta))
        if table.sides[index].asks_lead:
            self.ask_lead(push.clock)

    def ask_lead(self, clock: int, waited_s: float = 0.0) -> None:
        """What the coordinator does with what all shards hold."""
        everywhere = frozenset.intersection(*(frozenset(side.held()) for side in self.sides))
        here = [(slot, term, n) for at, slot, term, n in sorted(everywhere) if at == clock]
        came = {slot: samples for slot, _, samples in here}
        chosen = self.lead.quorum(clock, came, self.slots, waited_s) if came else None
        if isinstance(chosen, int | float) and not self.takes_time:
            self.ask_lead(clock, chosen)
        elif isinstance(chosen, frozenset):
            used = frozenset((slot, term) for slot, term, _ in here if slot in chosen)
            for index, side in enumerate(self.sides):
                self._hear(index, 0, side.decided(Decision(clock, used, frozenset())))

    def _hear(self, index: int, of_table: int, outcomes: list[PushOutcome]) -> None:
        table = self.tables[of_table]
        for outcome in outcomes:
            key = (index, outcome.slot, outcome.term, outcome.seq)
            table.outcomes[key].append(outcome.kind)
            player = self.players.get((outcome.slot, outcome.term))
            if player is not None:
                version = table.shards[index].version
                player.acks.append(
                    m.Ack(
                        index, SHARD_TERM, outcome.seq, outcome.kind, version, outcome.staleness, 0,
                        outcome.reason, of_table,
                    )
                )  # fmt: skip

    def settled(self, table: int = 0) -> dict[Which, list[str]]:
        """What settled every push for good."""
        outcomes = self.tables[table].outcomes
        return {key: [kind for kind in kinds if kind != HELD] for key, kinds in outcomes.items()}


class Player:
    """One replica at work, with the batches that it is given."""

    def __init__(
        self,
        algorithm: Method,
        shards: Shards,
        gradient: GradientOf,
        slot: int = 0,
        term: int = 1,
        *,
        batch_size: int = 1,
        samples_of: Callable[[Any], int] = lambda batch: 1,
        own_lr: float = OWN_LR,
        options: Any = None,
    ) -> None:
        """own_lr: of SGD in the replica, if the method has an optimiser there. options: of the
        method, if they are not the default ones.
        """
        self.shards = shards
        self.gradient = gradient
        self.slot, self.term = slot, term
        self.samples_of = samples_of
        self.todo: list[Batch] = []
        self.samples = 0
        """Computed; likewise those that were pushed, and those of portions that are done."""
        self.samples_pushed = self.samples_done = 0
        self.pushed = np.zeros(shards.size)
        """float64[d], the sum of all that was pushed to the parameters; a mean counts once for each
        of its samples.
        """
        kind = algorithm.push_kind(options if options is not None else algorithm.Options())
        self._pushes_means = bool(kind.target)
        self.fetches = 0
        of_servers = algorithm.shape.needs_servers
        self._progress = algorithm.shape.table(algorithm.shape.progress) if of_servers else 0
        self.parameters = np.full(shards.size, np.nan if of_servers else 1.0, np.float32)
        if "memory" in algorithm.shape.links:
            self.parameters = shards.memory
        self.acks: list[m.Ack] = []
        self.side = replica(algorithm, self.parameters, options, slot)
        self._context = Context(resend_s=1e6)
        self._queue = SendQueue(self._context.retries)
        me = identity(slot, term)
        tables = joined_tables(algorithm, self._context, shards.size, shards.count, me)
        name, links = f"worker-{slot}", algorithm.shape.links
        self._members = PeerMembers(self._context, name, connects="peers" in links)
        self.training = training(
            self._context, tables, algorithm, self.side, me=me, send_queue=self._queue,
            batch_size=batch_size, push_norm_max=1e300, own_lr=own_lr,
            members=self._members,
            collecting=Collecting(self._context, name, me, 1e9) if "group" in links else None,
        )  # fmt: skip
        self._now = 0.0
        self._leased = 0
        """Of the batches to do, those that are in leases already."""
        self._asked: m.LeaseRequest | None = None
        self._fetching: dict[tuple[int, int, int], m.Fetch] = {}
        """(table, shard, number) -> a fetch without an answer."""
        if algorithm.shape.twin:
            twin = registry.attribute(algorithm.shape.twin)
            problem = LeastSquares(size=shards.size)
            place = TwinPlace(problem, self.parameters, self.side.options)
            self._engine = Operations(twin(place), "by hand")
        self._own_thread = OwnThread()
        GroupDriver(self._own_thread, shards.groups)  # type: ignore[arg-type]
        shards.players[slot, term] = self
        for player in shards.players.values():
            player.meet()
        self.training.advance(self._now)

    @property
    def request(self) -> Need:
        """What it waits for."""
        assert self.training._need is not None
        return self.training._need

    def needs_data(self) -> bool:
        return isinstance(self.request, NextData | Gradient)

    def advance(self) -> None:
        """Until it needs a batch and has none, or waits for another replica."""
        while True:
            self._now += 1.0
            self._answer_fetches()
            while self.acks:
                self.training.on_message(self.acks.pop(0), self._now)
            self._lease()
            self._hear_of_group()
            is_at_rest = not self._step() and not self.acks and not self._may_lease()
            if is_at_rest and not self._own_thread.events:
                return

    def _step(self) -> bool:
        """Let it go on with what it has heard. Whether it wanted anything."""
        self.training.advance(self._now)
        effects = [*self._context.clear(), *self._queue.flush(self._now)]
        for effect in effects:
            self._perform(effect)
        return bool(effects)

    def tell_none(self) -> None:
        """There is no data for now."""
        assert self.needs_data()
        assert not self.todo
        self.advance()
        assert self._asked is not None, f"{self.request} asks for no data"
        asked, self._asked = self._asked, None
        lease = m.Lease(asked.request, 0, 0, 0, 0)
        self.training.on_message(lease, self._now)
        self.advance()

    def _perform(self, effect: object) -> None:
        match effect:
            case JoinGroup() | Reduce():
                self._own_thread.performs[type(effect)](effect)
            case Compute():
                self._compute(effect)
            case RunEngine(op, arrays, shapes):
                self._ran(self._engine.run(op, arrays, shapes))
            case StepAlong(gradient, rate):
                self.parameters -= np.float32(rate) * gradient
                self._ran(())
            case ExchangeOwn():
                self._ran((np.zeros(0, np.float32),))
            case Send(_, m.LeaseRequest() as asked):
                self._asked = asked
            case Send(peer, m.Fetch() as fetch):
                self._fetching[fetch.table, _number_in(peer), fetch.request] = fetch
            case Send(peer, m.Push() as push):
                self._push(_number_in(peer), push)
            case Send(peer, m.PeerRequest() as ask):
                other = self.shards.players[_number_in(peer), ask.to_term]
                other.training.on_ask(self._members.name.encode(), ask)
                other._step()
            case Send(bytes() as peer, m.PeerReply() as answer):
                other = self._asker(_number_in(peer.decode()))
                other.training.on_answer(self._members.name, answer, other._now)
            case Send(peer, m.PortionDone() as done):
                assert peer == COORDINATOR
                key = ("portion", done.data_epoch, done.portion)
                self._context.retries.done(key, self._now)
                self.samples_done += done.samples

    def _ran(self, arrays: tuple[Array, ...]) -> None:
        self.training.on_event(EngineRan(arrays), self._now)

    # ------------------------------------------------------------ data

    def _may_lease(self) -> bool:
        return self._asked is not None and len(self.todo) > self._leased

    def _lease(self) -> None:
        """Answer its question with the next portion of what there is to do."""
        if not self._may_lease():
            return
        assert self._asked is not None
        asked, self._asked = self._asked, None
        (epoch, portion, *_), _ = self.todo[self._leased]
        samples = 0
        for (of_epoch, of_portion, is_last, _), batch in self.todo[self._leased :]:
            if (of_epoch, of_portion) != (epoch, portion):
                break
            self._leased += 1
            samples += self.samples_of(batch)
            if is_last:
                break
        lease = m.Lease(asked.request, portion, epoch, 0, samples)
        self.training.on_message(lease, self._now)

    def _compute(self, effect: Compute) -> None:
        losses: list[float] = []
        is_usable = True
        while is_usable and len(losses) < effect.count:
            _, batch = self.todo.pop(0)
            self._leased -= 1
            step = self.gradient(self.parameters, batch)
            losses.append(step.loss)
            norm, gradient = euclidean_norm(step.gradient), step.gradient
            is_usable = bool(np.isfinite(step.loss) and np.isfinite(step.gradient).all())
            if is_usable:
                self.samples += step.samples
                if effect.own_lr is not None:
                    self.parameters -= effect.own_lr * step.gradient
        computed = Computed(
            losses[-1], gradient if effect.gather else None, np.zeros(0), norm, is_usable,
            tuple(losses[:-1]),
        )  # fmt: skip
        self.training.on_event(computed, self._now)
        self.advance()

    # ------------------------------------------------------------ servers

    def _answer_fetches(self) -> None:
        """As servers do: a read of all shards is answered when each may be read."""
        for key, fetch in list(self._fetching.items()):
            number, index, _ = key
            table = self.shards.tables[number]
            shard, side = table.shards[index], table.sides[index]
            has_own = self.training.links.tables[number][index].settled() >= fetch.after
            if not (has_own and side.may_read(fetch.slot, fetch.clock_min)):
                continue
            del self._fetching[key]
            self.fetches += (number, index) == (0, 0)
            version, seen = side.shown(fetch.slot) or (shard.version, shard.w)
            values = seen[fetch.lo : fetch.hi or shard.size].copy()
            message = m.Parameters(
                index, SHARD_TERM, fetch.request, version, values, table=number,
                clock=side.clock(),
            )  # fmt: skip
            self.training.on_message(message, self._now)

    def _push(self, index: int, push: m.Push) -> None:
        if push.table == self._progress:
            lo, length = self.shards.bounds[index][0] + push.at, push.delta.length
            if push.delta.arrays[0].size:  # Else nothing was pushed.
                times = push.samples if self._pushes_means else 1
                self.pushed[lo : lo + length] += times * push.delta.arrays[0]
            self.samples_pushed += push.samples if index == 0 else 0
        self.shards.take(index, push)

    # ------------------------------------------------------------ other players

    def _asker(self, slot: int) -> Player:
        term = max(term for other, term in self.shards.players if other == slot)
        return self.shards.players[slot, term]

    def meet(self) -> None:
        """Hear from the coordinator who takes part, and makes up the group."""
        slots, terms = zip(*sorted(self.shards.players), strict=True)
        addresses = tuple(f"worker-{slot}" for slot in slots)
        none = ("",) * len(slots)
        peers = m.Peers(self._members.number + 1, slots, (), terms, addresses, none)
        self._members.on_peers(peers, self.slot)
        self.training.side.members = self._members.slots
        if self.training.collecting is not None:
            self.training.on_message(m.Group(len(slots), slots, "here", True), self._now)
        for effect in self._context.clear():
            self._perform(effect)

    def _hear_of_group(self) -> None:
        events, self._own_thread.events = self._own_thread.events, []
        for event in events:
            self.training.on_event(event, self._now)


MOMENT_S = 2 * LATENCY_S


class OwnThread:
    """What the simulator's driver of a group wants of a process; without time."""

    alive = True
    frozen = False

    def __init__(self) -> None:
        self.performs: dict[type, Callable[[Any], None]] = {}
        self.events: list[object] = []
        self.timeline = self

    def perform(self, kind: type, does: Callable[[Any], None]) -> None:
        self.performs[kind] = does

    def post(self, event: object, after_s: float = 0.0) -> None:
        self.events.append(event)

    def after(self, delay_s: float, does: Callable[[], None]) -> None:
        """What takes a moment is done at once; no limit of a wait ever comes."""
        if delay_s < MOMENT_S:
            does()


def _number_in(peer: object) -> int:
    return int(str(peer).rpartition("-")[2])


def message_of(number: int, request: VectorRequest) -> m.VectorOp:
    changes, sums = request.changes, request.sums
    every = (*changes, *sums)
    return m.VectorOp(
        number, tuple(e.op for e in every), tuple(e.x for e in every), tuple(e.y for e in every),
        (*(change.a for change in changes), *(0.0 for _ in sums)),
    )  # fmt: skip


Evaluate = Callable[[int], tuple[float, int]]
"""A batch, by its number: (sum of losses, samples); puts the gradients into "accrued"."""


def requests(side: Lead, shards: Shards, evaluate: Evaluate) -> Iterator[Driving | str]:
    """Drive a method to its end: every request when it has been performed, then why it is over."""
    drives = side.drive()
    assert drives is not None
    request, clock = next(drives), -1
    while True:
        value: Any = None
        if isinstance(request, BatchRequest):
            clock += 1
            value = evaluate(clock)
        elif isinstance(request, VectorRequest):
            value = shards.perform(request)
        yield request
        try:
            request = drives.send(value)
        except StopIteration as end:
            yield end.value
            return


def drive(side: Lead, shards: Shards, evaluate: Evaluate) -> str:
    """Drive a method to its end; returns why it is over."""
    *_, reason = requests(side, shards, evaluate)
    assert isinstance(reason, str)
    return reason
