"""A replica at work: serves what the method's worker side asks for.

The method is a generator that is always blocked on exactly one request; after every event `advance`
looks whether that request can be served now. What a method should not have to think of happens
here: leases, the window of pushes, parameters that arrive while a gradient is being computed (they
are put in place between two steps), poisoned batches, and that nothing stays behind when the data
ends.
"""

from __future__ import annotations

from typing import Any

from dlctl import messages as m
from dlctl.algorithms.base import (
    Data,
    Fetch,
    NextData,
    NextGradient,
    Push,
    Request,
    Step,
    WorkerSide,
)
from dlctl.compress.base import Compressor
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.roles.protocol.effects import Compute, Computed, Settled
from dlctl.roles.protocol.meters import Latency, Rates
from dlctl.roles.worker.bad_gradients import BadGradients
from dlctl.roles.worker.fetching import Fetched, Fetcher
from dlctl.roles.worker.leasing import Leasing
from dlctl.roles.worker.pacing import FETCH, PUSH, Pacing
from dlctl.roles.worker.portions import Portion, Portions
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.shard_client import Identity, ShardClient
from dlctl.vector import zeros_like

LOSS_WEIGHT = 0.05
"""Of the newest loss in the running mean that is reported."""
BATCH_WEIGHT = 0.1
"""Of the newest batch in the running mean of the time for one."""
STUCK_S_MIN, STUCK_BATCHES = 10.0, 10.0
"""A batch that takes longer than both (seconds, and as many other batches) hangs in user code; an
evaluation is told of, but may well take so long."""
LONG_S_MIN, LONG_BATCHES = 2.0, 3.0  # One that is long is no fault yet.
ASTRAY = "a replica's own steps have led too far; a smaller local_lr may help"


class Training:
    def __init__(
        self,
        context: Context,
        identity: Identity,
        channels: list[ShardClient],
        send_queue: SendQueue,
        side: WorkerSide,
        compressor: Compressor,
        batch_size: int,
        lease_ahead_s: float,
        averaged: m.Array,
        push_norm_max: float,
    ) -> None:
        self.context = context
        self.identity = identity
        self.channels = channels
        self.send_queue = send_queue
        self.side = side
        self.compressor = compressor
        self.portions = Portions(batch_size, lease_ahead_s)
        self.leasing = Leasing(context, identity, self.portions)
        self.rates = Rates("samples", "push_bytes", "fetch_bytes")
        self.fetcher = Fetcher(channels, send_queue, self.rates)
        self.push_latency = Latency()
        self.pacing = Pacing(side, send_queue.limiters)
        self.steps = 0
        self.loss: float | None = None
        self.poison = BadGradients(push_norm_max)
        self.staleness_sum = self.staleness_number = 0
        self.draining = False
        self.parked = False
        """Drained: the method will not be resumed any more."""
        self._averaged = averaged
        self._generator = side.run()
        self._request: Request = next(self._generator)
        self._fetched: Fetched | None = None
        self._fetch_started = False
        self._has_parameters = False
        self._computing: tuple[Portion, int] | None = None
        self._busy_since = 0.0
        self._batch_s = 0.0
        self._step: Step | None = None
        self._announced = self._left_out = False
        """`NextData` has named the batch that is next; that batch was computed and refused."""
        self._told_draining = False
        self._paused = False
        self._steps_pushed = 0
        self._unsettled: dict[int, int] = {}
        """Push number -> shards that have not settled it."""
        self._steps_of: dict[int, tuple[int, int]] = {}
        """Push number -> its first and last step."""

    # ------------------------------------------------------------ the method and its requests

    def advance(self, now: float) -> None:
        """Serve the method's requests for as long as they can be served at once."""
        if self._paused:
            return
        if self._fetched is not None and self._fetched.complete:
            self.pacing.fetched(now)
        self.fetcher.model_changes(self.side.changes_parameters())
        self._place_arrivals()
        while not self.parked:
            done, value = self._serve(self._request, now)
            if not done:
                return
            self._request = self._generator.send(value)

    def _serve(self, request: Request, now: float) -> tuple[bool, Any]:
        """(whether the method can go on, what it is resumed with)."""
        match request:
            case NextGradient(own_lr):
                return self._serve_gradient(own_lr, now)
            case NextData():
                return self._serve_data(now)
            case Push():
                return self._serve_push(request, now)
            case Fetch():
                return self._serve_fetch(request, now)

    def deadline(self) -> float | None:
        """When to ask for data again; only while data is what this replica waits for."""
        waits = isinstance(self._request, NextGradient | NextData) and not self._computing
        return self.leasing.ask_again_at if waits and not self.parked and not self._paused else None

    def pause(self, now: float) -> bool:
        """Leave the model alone until `resume`, if no gradient is being computed now."""
        self._paused = self._computing is None
        if self._paused:
            self.pacing.waits("", now)
            self._busy_since = now
        return self._paused

    def resume(self) -> None:
        self._paused = False

    def phase(self) -> str:
        if self._computing:
            return "computing"
        if self._paused:
            return "evaluating"
        if self.parked:
            return "draining" if self.busy() else "drained"
        waits = {Fetch: "fetching", Push: "pushing"}
        return waits.get(type(self._request), "waiting for data")

    def stuck_s(self, now: float) -> float:
        """How long the present batch or evaluation takes, if far longer than it should, else 0."""
        took_s = now - self._busy_since if self._computing or self._paused else 0.0
        return took_s if took_s > max(STUCK_S_MIN, STUCK_BATCHES * self._batch_s) else 0.0

    def long_s(self, now: float) -> float:
        """The same of a batch that only takes longer than the others did."""
        took_s = now - self._busy_since if self._computing else 0.0
        return took_s if took_s > max(LONG_S_MIN, LONG_BATCHES * self._batch_s) else 0.0

    def has_unpushed_steps(self) -> bool:
        """Whether there are steps that no push has taken anything of yet."""
        return self.steps != self._steps_pushed

    def busy(self) -> bool:
        """Whether something of this replica is not settled yet."""
        return bool(self._unsettled) or self.context.retries.count("portion") > 0

    # ------------------------------------------------------------ fetch

    def _serve_fetch(self, request: Fetch, now: float) -> tuple[bool, Any]:
        if not self._fetch_started:
            # A fetch that is still under way serves as this one: asking twice brings nothing newer.
            if self._fetched is None:
                self._fetched = self.fetcher.start(request.clock_min)
                self.pacing.fetch_began(now, waits=request.wait)
            self._fetch_started = True
        if (request.wait or not self._has_parameters) and self._fetched:
            self.pacing.waits(FETCH if request.wait else "", now)
            return False, None
        self.pacing.waits("", now)
        self._fetch_started = False
        return True, self._clock()

    def _clock(self) -> int:
        return max(c.version for c in self.channels)

    def _place_arrivals(self) -> None:
        """Never while a gradient is being computed: it would be of no parameters at all."""
        if self._fetched is None or self._computing:
            return
        if self._fetched.slices:
            self.side.settle()
        self.fetcher.place(self._fetched, self.side.parameters, self.side.placed)
        if self._fetched.complete:
            self._fetched = None
            self.side.fetched_clock = self._clock()
            self._has_parameters = True

    # ------------------------------------------------------------ push

    def _serve_push(self, request: Push, now: float) -> tuple[bool, Any]:
        if not self._may_push():
            self.pacing.waits(PUSH, now)
            return False, None
        vector = request.vector if request.vector is not None else zeros_like(self.side.parameters)
        number = self.channels[0].next_seq
        steps = self._steps_of[number] = self._steps_pushed, max(self.steps - 1, 0)
        for c in self.channels:
            self._push_slice(c, vector[c.lo : c.hi], request, steps)
        self._unsettled[number] = len(self.channels)
        self.pacing.pushed(number, now)
        self.portions.pushed(number)
        if request.vector is None and self.has_unpushed_steps():
            self._refused(number, ASTRAY, "not pushed")
        self._steps_pushed = self.steps
        self.leasing.told_no_data = False
        self._push_buffers()
        return True, None

    def _may_push(self) -> bool:
        window = self.send_queue.push_window_bytes
        if window is not None and sum(c.bytes_under_way() for c in self.channels) >= window:
            return False
        return all(c.joined and c.has_room() for c in self.channels)

    def _push_slice(self, c: ShardClient, u: Any, request: Push, steps: tuple[int, int]) -> None:
        delta = self.compressor.take(u, c.shard)
        push = c.push(*steps, request.samples, request.clock, delta, request.portion)
        self.rates.add("push_bytes", delta.nbytes)
        self.send_queue.queue("push", c.push_key(push.seq), c.peer, push, delta.nbytes)

    def on_joined_again(self, shard: int, now: float) -> None:
        """What the shard had been asked, and has forgotten or could not answer, is asked again."""
        channel = self.channels[shard]
        keys = [key for key, peer, _ in self.context.retries.waiting() if peer == channel.peer]
        for key in keys:
            if _kind(key) == "fetch":
                self.context.do(*self.context.retries.resend_now(key, now))
        if shard == 0 and self._steps_pushed:
            self._push_buffers()

    def _push_buffers(self) -> None:
        me, samples = self.identity, self.rates.total["samples"]
        if self._averaged.size and samples:  # without: those of a new model, not the run's
            buffers = m.PushBuffers(me.slot, me.epoch, samples, self._averaged)
            self.context.send(self.channels[0].peer, buffers)

    def on_ack(self, ack: m.Ack, now: float) -> None:
        """What a server says of a push. Raises Fenced."""
        channel = self.channels[ack.shard]
        took_s, sends = channel.on_ack(ack, now)
        self.context.do(*sends)
        if took_s is None:
            return
        self.context.do(Settled(self.identity.epoch, channel.shard, channel.settled()))
        self.push_latency.add(took_s)
        self.staleness_sum += ack.staleness
        self.staleness_number += 1
        if ack.outcome == m.REFUSED:
            self._refused(ack.seq, ack.reason, f"server-{ack.shard} refused a push")
        self._unsettled[ack.seq] -= 1
        if not self._unsettled[ack.seq]:
            del self._unsettled[ack.seq], self._steps_of[ack.seq]
            self.poison.settled(ack.seq)
            self.pacing.settled(ack.seq, now)
            self._report_done(self.portions.settled(ack.seq), now)

    def _refused(self, number: int, reason: str, what: str) -> None:
        """Of this push a shard gets nothing."""
        self.poison.refused(number, reason, *self._steps_of[number])
        self.portions.refused(number)
        self.context.note("warning", f"{what} ({self.poison.last}): {reason}")

    # ------------------------------------------------------------ data

    def _serve_gradient(self, own_lr: float | None, now: float) -> tuple[bool, Any]:
        if self._computing:
            return False, None
        if self._step is not None or self._left_out:
            step, self._step, self._left_out = self._step, None, False
            return True, step
        if self._announced and self._ends_here():
            # The batch was named before the end was: the method hears of the end where it asks for
            # data, which is where it pushes what it has accrued.
            self._announced = False
            return True, None
        done, data = self._find_data(now)
        if data is not None:
            self._compute(self.portions.next_batch(), own_lr, now)
            return False, None
        return done, None

    def _serve_data(self, now: float) -> tuple[bool, Any]:
        done, data = self._find_data(now)
        self._announced = data is not None
        return done, data

    def _find_data(self, now: float) -> tuple[bool, Data | None]:
        """(whether this is an answer for the method, the batch to compute next if there is one)."""
        if self._ends_here():
            # The first time the method may still push what it has accrued; then it is parked.
            self.parked, self._told_draining = self._told_draining, True
            return not self.parked, None
        data = self.portions.ahead()
        return (True, data) if data is not None else (self.leasing.wait(now), None)

    def _ends_here(self) -> bool:
        return self.draining and self.portions.at_boundary()

    def _compute(self, batch: tuple[Portion, int], own_lr: float | None, now: float) -> None:
        self._computing, self._busy_since = batch, now
        for c in self.channels:
            c.base_version = c.version
        portion, number = batch
        lease, limit = portion.lease, self.poison.norm_max(own_lr)
        self.context.do(Compute(lease.data_epoch, lease.start, lease.stop, number, own_lr, limit))
        if not self.draining:
            self.leasing.look_ahead(self._batch_s, now)

    # ------------------------------------------------------------ gradients

    def on_computed(self, event: Computed, now: float) -> None:
        """A gradient has come. If it is of no use, it gets no further."""
        assert self._computing is not None
        portion, number = self._computing
        self._computing = None
        took_s = now - self._busy_since
        self._batch_s += (BATCH_WEIGHT if self._batch_s else 1.0) * (took_s - self._batch_s)
        announced, self._announced = self._announced, False
        if event.is_usable:
            start, stop = portion.batch_range(number)
            self.poison.computed(self.steps, portion.in_words(number))
            self._accept(event, portion, stop - start)
            self.pacing.computed(took_s)
        else:
            self._refuse(event, portion, number)
            self._left_out = announced
        if portion.is_last(number):
            self.portions.finish(portion)
            if self.steps == self._steps_pushed:
                self._finish_without_push(now)

    def _finish_without_push(self, now: float) -> None:
        """The last batches were refused: what there is of the portion has been pushed before."""
        last = self.channels[0].next_seq - 1
        self.portions.pushed(last)
        if last not in self._unsettled:
            self._report_done(self.portions.settled(last), now)

    def _accept(self, event: Computed, portion: Portion, samples: int) -> None:
        self._step = Step(event.gradient, samples, event.loss, event.norm)
        self._averaged = event.averaged
        self.steps += 1
        portion.steps += 1
        portion.samples += samples
        portion.loss_sum += event.loss * samples
        self.rates.add("samples", samples)
        change = event.loss - self.loss if self.loss is not None else 0.0
        self.loss = event.loss if self.loss is None else self.loss + LOSS_WEIGHT * change

    def _refuse(self, event: Computed, portion: Portion, number: int) -> None:
        """A NaN would stay in the residual for ever: a poisoned gradient never gets that far."""
        self.poison.of_no_use(f"{event.odd}, {portion.in_words(number)}")
        self.context.note("warning", f"of no use, not pushed: {self.poison.last}")

    def _report_done(self, done: list[Portion], now: float) -> None:
        for p in done:
            lease, me = p.lease, self.identity
            message = m.PortionDone(
                me.slot, me.epoch, lease.data_epoch, lease.portion, p.steps, p.samples, p.loss_sum
            )
            self.context.ask(
                ("portion", lease.data_epoch, lease.portion), COORDINATOR, message, now
            )

    # ------------------------------------------------------------ figures

    def metrics(self, now: float) -> dict[str, Any]:
        values: dict[str, Any] = {"step": self.steps, **self.rates.report(now)}
        values |= self.push_latency.quantiles_ms("push")
        values |= self.fetcher.latency.quantiles_ms("fetch")
        values |= self.pacing.metrics(now)
        if self.loss is not None:
            values["loss"] = round(self.loss, 6)
        if self.staleness_number:
            values["staleness_mean"] = round(self.staleness_sum / self.staleness_number, 2)
        values["repeated"] = self.context.retries.repeated
        values["refused"] = self.poison.pushes
        # Who says that it has none has been told that all which it has done is noted.
        values["portions"] = self.portions.not_done() + self.context.retries.count("portion")
        values["nonfinite_steps"] = self.poison.steps
        return values


def _kind(key: object) -> object:
    return key[0] if isinstance(key, tuple) else key
