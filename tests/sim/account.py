"""What the replicas of a run have computed and pushed, and what its shards have made of it: for
methods that are tried (`try_method.py`). Nothing of it trusts the method's shard side.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from dlctl import registry
from dlctl.algorithms.base import Method
from dlctl.algorithms.holding import HeldPush, JointStep
from dlctl.algorithms.shared_norm import SharedNorm
from dlctl.algorithms.tables import optimizer_of, side_of
from dlctl.compress.base import Delta
from dlctl.compress.none import Dense
from dlctl.compress.plain import expand
from dlctl.optim import bounds
from dlctl.shards.memory import in_memory
from dlctl.sim.checkers.base import Checker
from dlctl.sim.objectives import Batch, LeastSquares
from dlctl.sim.process import Process
from dlctl.sim.world import World
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Peer, Send
from dlctl.wire.messages import APPLIED, BUFFERED, LATE, REFUSED, Array

NEAR = 1e-4
"""Results that are apart by less, as a fraction of the way from the start, differ by rounding."""


class Key(NamedTuple):
    shard: int
    slot: int
    term: int
    seq: int


class Recorded(LeastSquares):
    """Keeps the rows of every batch, by the process that has computed it. With much noise the
    parameters stay in motion: two different ways do not end at one solution.
    """

    def __init__(self, samples: int) -> None:
        super().__init__(samples=samples, noise=0.5)
        self.batches: defaultdict[tuple[int, int], list[Array]] = defaultdict(list)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        self.batches[batch.slot, batch.term].append(batch.rows)
        return super().gradient(w, batch)


class Account(Checker):
    """Of the table of parameters. With `alone` nobody dies, and all of it has to agree."""

    def __init__(self, method: Method, problem: Recorded, *, alone: bool) -> None:
        self.method = method
        self.problem = problem
        self.alone = alone
        self.pushes: dict[Key, m.Push] = {}
        self.outcomes: dict[Key, str] = {}
        """What settled each push, in the order in which that became known."""
        self.progress: dict[Key, int] = {}
        """The samples of the pushes to the table that holds the replicas' steps."""
        self._senders: dict[tuple[Process, Peer], tuple[int, int]] = {}
        self._fetches: dict[tuple[str, int], tuple[Process, int]] = {}
        """(worker, shard) -> its newest read that waits for a clock: the process, the clock."""

    def on_message(self, process: Process, peer: Peer, message: m.Message) -> None:
        if isinstance(message, m.Join | m.Push):
            self._senders[process, peer] = message.slot, message.term

    def on_effect(self, process: Process, effect: Effect) -> None:
        if not isinstance(effect, Send):
            return
        match effect.message:
            case m.Push() as push:
                key = Key(_number(effect.peer), push.slot, push.term, push.seq)
                if push.table == self.method.shape.table(self.method.shape.progress):
                    self.progress[key] = push.samples
                if not push.table:
                    self.pushes.setdefault(key, push)
            case m.Fetch(table=0) as fetch:
                self._fetches[process.name, _number(effect.peer)] = process, fetch.clock_min
            case m.Ack(table=0) as ack if ack.outcome in (APPLIED, BUFFERED, LATE, REFUSED):
                if who := self._senders.get((process, effect.peer)):
                    self.outcomes.setdefault(Key(ack.shard, *who, ack.seq), ack.outcome)

    # ------------------------------------------------------------ at the end

    def at_end(self, world: World) -> None:
        if world.store.run.get("state") != "finished" or self.method.shard is None:
            return
        counts = [shard.samples for shard in _shards(world)]
        for shard, count in enumerate(counts):
            self._check_count(shard, count)
        if not self.alone:
            return
        if len(set(counts)) > 1:
            raise self.broken(f"the shards have applied {_listed(counts)} samples")
        self._check_pushed()
        if (expected := self.of_pushes(world)) is not None:
            self._compare(world, expected, "what the pushes add up to, each applied once")
        if (expected := self.of_batches(world)) is not None:
            self._compare(world, expected, "what one process makes of the same batches")

    def _check_count(self, shard: int, count: int) -> None:
        """A dead server may have applied what it never acknowledged, but no push twice."""
        of_shard = [key for key in self.pushes if key.shard == shard]
        applied = [key for key in of_shard if self.outcomes.get(key) in (APPLIED, BUFFERED)]
        least = sum(self.pushes[key].samples for key in applied)
        open_ = [] if self.alone else [key for key in of_shard if key not in self.outcomes]
        most = least + sum(self.pushes[key].samples for key in open_)
        if not least <= count <= most:
            raise self.broken(
                f"server-{shard} counts {count} samples in its updates, and has acknowledged "
                f"{least} as applied"
            )

    def _check_pushed(self) -> None:
        """A late push is dropped, or its steps are in a later one again."""
        computed = sum(len(rows) for batches in self.problem.batches.values() for rows in batches)
        for shard in {key.shard for key in self.progress}:
            pushed = {key: n for key, n in self.progress.items() if key.shard == shard}
            late = sum(n for key, n in pushed.items() if self.outcomes.get(key) == LATE)
            every = sum(pushed.values())
            if not every - late <= computed <= every:
                what = f", {late} of them late" if late else ""
                raise self.broken(
                    f"the replicas have computed {computed} samples, and pushed {every} to "
                    f"server-{shard}{what}"
                )

    def _compare(self, world: World, expected: Array, what: str) -> None:
        found, start = world.weights(), self.problem.initial()
        apart, way = np.linalg.norm(found - expected), np.linalg.norm(expected - start)
        if not apart <= NEAR * way:
            raise self.broken(
                f"the parameters are not {what}: {apart:.3g} apart, after a way of {way:.3g} from "
                "the start"
            )

    # ------------------------------------------------------------ the same in one process

    def of_pushes(self, world: World) -> Array | None:
        """float32[d]: the steps of the pushes that count, made here; None: the shard side neither
        averages pushes nor applies them unchanged, so only itself knows what to expect.
        """
        assert self.method.shard is not None
        options = self.method.Options(**world.job.algorithm.options)
        kind = self.method.shard.of(options)
        if not (kind.averages or kind.applies_as_pushed):
            return None
        parts = []
        for index in range(world.job.servers.count):
            held = self._held(world, index, options)
            for _, pushes in sorted(held.clocks.items() if kind.averages else ()):
                held.step.make(pushes)
            for push in held.in_order if not kind.averages else ():
                held.step.side.shard.apply(push.kept, push.push.samples)
            parts.append(held.step.side.shard.w)
        return np.concatenate(parts)

    def _held(self, world: World, index: int, options: Any) -> _Held:
        """A shard at its start, and the pushes that it has applied."""
        job, table = world.job, self.method.shape.tables[0]
        lo, hi = bounds.of_job(job, self.problem.layout)[index : index + 2]
        rule = registry.load("optimizers", job.optimizer.name)
        rule = rule(rule.Options(**job.optimizer.options))
        rule = optimizer_of(table, self.method, options, rule, job.workers.count)
        shard = in_memory(rule, self.problem.initial()[lo:hi])
        side = side_of(table, self.method, options, shard)
        side.lo = lo
        held = _Held(JointStep(side, SharedNorm(list)), defaultdict(list), [])
        for key, outcome in self.outcomes.items():
            if key.shard != index or outcome not in (APPLIED, BUFFERED):
                continue
            push = self.pushes[key]
            size = push.delta.length
            delta = expand(Dense, push.delta, size)
            if push.is_part:
                delta = Delta(delta.dense(size), push.at + np.arange(size))
            held.in_order.append(HeldPush(push, delta))
            held.clocks[push.clock].append(HeldPush(push, side.mean.kept(delta)))
        for pushes in held.clocks.values():
            pushes.sort(key=lambda each: (each.push.slot, each.push.term))
        return held

    def of_batches(self, world: World) -> Array | None:
        """float32[d]: one process that steps along the gradient of all batches of a step; None: the
        method does not declare that it is that.
        """
        assert self.method.shard is not None
        options = self.method.Options(**world.job.algorithm.options)
        is_that = self.method.shard.averages and self.method.mean.is_of_gradients
        if not is_that or not self.method.pushes_gradients(options):
            return None
        steps = defaultdict[int, list[Array]](list)
        left = {who: list(batches) for who, batches in self.problem.batches.items()}
        for key in sorted(key for key in self.pushes if key.shard == 0):
            push, rows = self.pushes[key], np.zeros(0, np.int64)
            while rows.size < push.samples and left.get((key.slot, key.term)):
                rows = np.append(rows, left[key.slot, key.term].pop(0))
            if self.outcomes.get(key) == APPLIED and rows.size:
                steps[push.clock].append(rows)
        w, lr = self.problem.initial(), np.float32(world.job.optimizer.options["lr"])
        for clock in sorted(steps):
            batch = Batch(np.concatenate(steps[clock]), 0, 0, 0)
            w -= lr * LeastSquares.gradient(self.problem, w, batch)[1]
        return w

    # ------------------------------------------------------------ when it stands still

    def waits(self, world: World) -> str:
        """Which clock each replica waits for, and where the shards are."""
        found = []
        sides = {n: p for p in world.processes if (n := _shard_of(p)) is not None and p.alive}
        for (name, shard), (process, clock) in sorted(self._fetches.items()):
            if process.alive and shard in sides and clock > (at := _side(sides[shard]).clock()):
                found.append(f"{name} waits for clock {clock} of server-{shard}, which is at {at}")
        for shard, process in sorted(sides.items()):
            if slots := sorted(_side(process).waits_for()):
                names = ", ".join(f"worker-{slot}" for slot in slots)
                at = _side(process).clock()
                found.append(f"server-{shard} waits at clock {at} for pushes of {names}")
        return "; ".join(found)


class _Held(NamedTuple):
    step: JointStep
    clocks: defaultdict[int, list[HeldPush]]
    in_order: list[HeldPush]


def _number(peer: object) -> int:
    return int(str(peer).rpartition("-")[2])


def _shard_of(process: Process) -> int | None:
    serving = getattr(process.machine, "serving", None)
    return None if serving is None else int(serving.index)


def _side(process: Process) -> Any:
    return process.machine.serving.side  # type: ignore[attr-defined]


def _shards(world: World) -> list[Any]:
    """The newest process's shard of each server."""
    found = {n: p for p in world.processes if (n := _shard_of(p)) is not None}
    return [_side(found[n]).shard for n in sorted(found)]


def _listed(counts: list[int]) -> str:
    return ", ".join(f"server-{shard}: {count}" for shard, count in enumerate(counts))
