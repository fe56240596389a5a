"""A replica at work: serves what the method's worker side asks for.

The method is a generator that is always blocked on exactly one request; after every event `advance`
looks whether that request can be served now. What a method should not have to think of happens
here: leases, the window of pushes, parameters that arrive while a gradient is being computed (they
are put in place between two steps), poisoned batches, and that nothing stays behind when the data
ends.
"""

from __future__ import annotations

import math
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
from dlctl.roles.channel import Channel, Identity
from dlctl.roles.desk import COORDINATOR, Desk
from dlctl.roles.effects import Compute, Computed
from dlctl.roles.fetching import Fetched, Fetcher
from dlctl.roles.meters import Latency, Rates
from dlctl.roles.outbox import Outbox
from dlctl.roles.portions import Portion, Portions
from dlctl.vector import is_finite, zeros_like

IDLE_S = 0.2
"""Between two questions for data while there is none."""
LOSS_WEIGHT = 0.05
"""Of the newest loss in the running mean that is reported."""
BATCH_WEIGHT = 0.1
"""Of the newest batch in the running mean of the time for one."""
STUCK_S_MIN, STUCK_BATCHES = 60.0, 10.0
"""A batch that takes longer than both (seconds, and as many other batches) hangs in user code."""


class Training:
    def __init__(
        self,
        desk: Desk,
        identity: Identity,
        channels: list[Channel],
        outbox: Outbox,
        side: WorkerSide,
        compressor: Compressor,
        batch_size: int,
        averaged: m.Array,
    ) -> None:
        self.desk = desk
        self.identity = identity
        self.channels = channels
        self.outbox = outbox
        self.side = side
        self.compressor = compressor
        self.portions = Portions(batch_size)
        self.rates = Rates("samples", "push_bytes", "fetch_bytes")
        self.fetcher = Fetcher(channels, outbox, self.rates)
        self.push_latency = Latency()
        self.steps = 0
        self.loss: float | None = None
        self.refused = 0
        """Pushes that a server would not take."""
        self.nonfinite = self.nonfinite_in_row = 0
        self.last_poison = ""
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
        self._lease_requests = 0
        self._told_no_data = self._told_draining = False
        self._none_now = False
        self._ask_again_at: float | None = None
        self._paused = False
        self._steps_pushed = 0
        self._unsettled: dict[int, int] = {}
        """Push number -> shards that have not settled it."""

    # ------------------------------------------------------------ the method and its requests

    def advance(self, now: float) -> None:
        """Serve the method's requests for as long as they can be served at once."""
        if self._paused:
            return
        self._place_arrivals()
        while not self.parked:
            done, value = self._serve(self._request, now)
            if not done:
                return
            self._request = self._generator.send(value)

    def _serve(self, request: Request, now: float) -> tuple[bool, Any]:
        """(whether the method can go on, what it is resumed with)."""
        match request:
            case NextGradient():
                return self._serve_gradient(now)
            case NextData():
                return self._serve_data(now)
            case Push():
                return self._serve_push(request)
            case Fetch():
                return self._serve_fetch(request, now)

    def deadline(self) -> float | None:
        """When to ask for data again; only while data is what this replica waits for."""
        waits = isinstance(self._request, NextGradient | NextData) and not self._computing
        return self._ask_again_at if waits and not self.parked and not self._paused else None

    def pause(self, now: float) -> bool:
        """Leave the model alone until `resume`, if no gradient is being computed now."""
        self._paused = self._computing is None
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

    def has_unpushed_steps(self) -> bool:
        """Whether the residual holds gradients that no push has taken anything of yet."""
        return self.steps != self._steps_pushed

    def busy(self) -> bool:
        """Whether something of this replica is not settled yet."""
        keys = (key for key, _, _ in self.desk.outstanding.waiting())
        return bool(self._unsettled) or any(_kind(key) == "portion" for key in keys)

    # ------------------------------------------------------------ fetch

    def _serve_fetch(self, request: Fetch, now: float) -> tuple[bool, Any]:
        if not self._fetch_started:
            # A fetch that is still under way serves as this one: asking twice brings nothing newer.
            self._fetched = self._fetched or self.fetcher.start(request.clock_min, now)
            self._fetch_started = True
        if (request.wait or not self._has_parameters) and self._fetched:
            return False, None
        self._fetch_started = False
        return True, max(c.version for c in self.channels)

    def _place_arrivals(self) -> None:
        """Never while a gradient is being computed: it would be of no parameters at all."""
        if self._fetched is None or self._computing:
            return
        self.fetcher.place(self._fetched, self.side.parameters)
        if self._fetched.complete:
            self._fetched = None
            self._has_parameters = True

    # ------------------------------------------------------------ push

    def _serve_push(self, request: Push) -> tuple[bool, Any]:
        if not all(c.joined and c.has_room() for c in self.channels):
            return False, None
        vector = request.vector if request.vector is not None else zeros_like(self.side.parameters)
        number = self.channels[0].next_seq
        for c in self.channels:
            self._push_slice(c, vector[c.lo : c.hi], request)
        self._unsettled[number] = len(self.channels)
        self.portions.pushed(number)
        self._steps_pushed = self.steps
        self._told_no_data = False
        self._push_buffers()
        return True, None

    def _push_slice(self, c: Channel, u: Any, request: Push) -> None:
        delta = self.compressor.take(u)
        last_step = max(self.steps - 1, 0)
        push = c.push(
            self._steps_pushed, last_step, request.samples, request.clock, delta, request.portion
        )
        self.rates.add("push_bytes", delta.nbytes)
        self.outbox.queue("push", c.push_key(push.seq), c.peer, push, delta.nbytes)

    def _push_buffers(self) -> None:
        if self._averaged.size:
            me, samples = self.identity, self.rates.total["samples"]
            buffers = m.PushBuffers(me.slot, me.epoch, samples, self._averaged)
            self.desk.send(self.channels[0].peer, buffers)

    def on_ack(self, ack: m.Ack, now: float) -> None:
        """What a server says of a push. Raises Fenced."""
        took_s, sends = self.channels[ack.shard].on_ack(ack, now)
        self.desk.do(*sends)
        if took_s is None:
            return
        self.push_latency.add(took_s)
        self.staleness_sum += ack.staleness
        self.staleness_number += 1
        if ack.outcome == m.REFUSED:
            self.refused += 1
            self.desk.note("warning", f"server-{ack.shard} refused a push: {ack.reason}")
        self._unsettled[ack.seq] -= 1
        if not self._unsettled[ack.seq]:
            del self._unsettled[ack.seq]
            self._report_done(self.portions.settled(ack.seq), now)

    # ------------------------------------------------------------ data

    def _serve_gradient(self, now: float) -> tuple[bool, Any]:
        if self._computing:
            return False, None
        if self._step is not None or self._left_out:
            step, self._step, self._left_out = self._step, None, False
            return True, step
        done, data = self._find_data(now)
        if data is not None:
            self._compute(self.portions.next_batch(), now)
            return False, None
        return done, None

    def _serve_data(self, now: float) -> tuple[bool, Any]:
        done, data = self._find_data(now)
        self._announced = data is not None
        return done, data

    def _find_data(self, now: float) -> tuple[bool, Data | None]:
        """(whether this is an answer for the method, the batch to compute next if there is one)."""
        if self.draining and self.portions.at_boundary():
            # The first time the method may still push what it has accrued; then it is parked.
            self.parked, self._told_draining = self._told_draining, True
            return not self.parked, None
        data = self.portions.ahead()
        return (True, data) if data is not None else (self._waited_in_vain(now), None)

    def _compute(self, batch: tuple[Portion, int], now: float) -> None:
        self._computing, self._busy_since = batch, now
        portion, number = batch
        lease = portion.lease
        self.desk.do(Compute(lease.data_epoch, lease.start, lease.stop, number))
        if self.portions.wants_lease() and not self.draining:
            self._request_lease(now)

    def _waited_in_vain(self, now: float) -> bool:
        """Ask for data. True if the method has to be told that there is none."""
        if self._none_now:
            self._none_now = False
            if not self._told_no_data:
                self._told_no_data = True
                return True
            self._ask_again_at = now + IDLE_S
        if self._ask_again_at is None or now >= self._ask_again_at:
            self._ask_again_at = None
            self._request_lease(now)
        return False

    def _request_lease(self, now: float) -> None:
        if "lease" not in self.desk.outstanding:
            self._lease_requests += 1
            me = self.identity
            request = m.LeaseRequest(me.slot, me.epoch, self._lease_requests)
            self.desk.ask("lease", COORDINATOR, request, now)

    def on_lease(self, lease: m.Lease, now: float) -> None:
        if lease.request != self._lease_requests:
            return
        if self.desk.outstanding.done("lease", now) is None:
            return
        if lease.start < lease.stop:
            self._told_no_data = False
            self.portions.take(lease)
        elif self.portions.current is None:
            self._none_now = True

    # ------------------------------------------------------------ gradients

    def on_computed(self, event: Computed, now: float) -> None:
        """A gradient has come. It gets no further unless it and its loss are finite."""
        assert self._computing is not None
        portion, number = self._computing
        self._computing = None
        self._batch_s += BATCH_WEIGHT * (now - self._busy_since - self._batch_s)
        announced, self._announced = self._announced, False
        if math.isfinite(event.loss) and is_finite(event.gradient):
            start, stop = portion.batch_range(number)
            self._accept(event, portion, stop - start)
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
        self._step = Step(event.gradient, samples, event.loss)
        self._averaged = event.averaged
        self.nonfinite_in_row = 0
        self.steps += 1
        portion.steps += 1
        portion.samples += samples
        portion.loss_sum += event.loss * samples
        self.rates.add("samples", samples)
        change = event.loss - self.loss if self.loss is not None else 0.0
        self.loss = event.loss if self.loss is None else self.loss + LOSS_WEIGHT * change

    def _refuse(self, event: Computed, portion: Portion, number: int) -> None:
        """A NaN would stay in the residual for ever: a poisoned gradient never gets that far."""
        self.nonfinite += 1
        self.nonfinite_in_row += 1
        start, stop = portion.batch_range(number)
        where = f"samples {start}..{stop - 1} of the order of epoch {portion.lease.data_epoch}"
        self.last_poison = f"loss {event.loss}, {where}"
        self.desk.note("warning", f"not finite, not pushed: {self.last_poison}")

    def _report_done(self, done: list[Portion], now: float) -> None:
        for p in done:
            lease, me = p.lease, self.identity
            message = m.PortionDone(
                me.slot, me.epoch, lease.data_epoch, lease.portion, p.steps, p.samples, p.loss_sum
            )
            self.desk.ask(("portion", lease.data_epoch, lease.portion), COORDINATOR, message, now)

    # ------------------------------------------------------------ figures

    def metrics(self, now: float) -> dict[str, Any]:
        values: dict[str, Any] = {"step": self.steps, **self.rates.report(now)}
        values |= self.push_latency.quantiles_ms("push")
        values |= self.fetcher.latency.quantiles_ms("fetch")
        if self.loss is not None:
            values["loss"] = round(self.loss, 6)
        if self.staleness_number:
            values["staleness_mean"] = round(self.staleness_sum / self.staleness_number, 2)
        values["repeated"] = self.desk.outstanding.repeated
        values["refused"] = self.refused
        values["nonfinite_steps"] = self.nonfinite
        return values


def _kind(key: object) -> object:
    return key[0] if isinstance(key, tuple) else key
