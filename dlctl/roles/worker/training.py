"""A running replica: serves the needs of the method's replica side.

The method is a generator that always waits for exactly one need; after every event `advance` polls
the service of that need. The services handle what a method need not care about: leases, the window
of pushes, parameters that arrive while a gradient is being computed (they are installed between two
steps), discarded batches, and draining when the data ends.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from dlctl import messages as m
from dlctl import outdated
from dlctl.algorithms import shapes
from dlctl.algorithms.base import Method, ReplicaSide
from dlctl.algorithms.needs import (
    Ask,
    Collective,
    Done,
    Engine,
    Gradient,
    Need,
    NextData,
    NextRows,
    OwnState,
    OwnStep,
    Read,
    Settle,
    Write,
)
from dlctl.compress.base import Compressor
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import Computed
from dlctl.roles.protocol.meters import Rates
from dlctl.roles.worker.bad_gradients import BadGradients
from dlctl.roles.worker.fetching import Fetcher
from dlctl.roles.worker.intervals import Pacing
from dlctl.roles.worker.leases import Portions
from dlctl.roles.worker.progress import OwnRate, Progress
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.roles.worker.services.asking import Answering, Asking, Members
from dlctl.roles.worker.services.base import Phase, Service
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.roles.worker.services.computing import Computing, Engines
from dlctl.roles.worker.services.reading import Reading
from dlctl.roles.worker.services.taking_over import Sharing, TakingOver
from dlctl.roles.worker.services.writing import Writing
from dlctl.roles.worker.shard_client import Identity, ShardClient


class Training:
    """One replica. It drives the method on behalf of the worker role."""

    is_paused = False
    """An evaluation is running, possibly with other values in the model's place."""

    def __init__(
        self,
        *,
        context: Context,
        identity: Identity,
        tables: list[list[ShardClient]],
        send_queue: SendQueue,
        method: Method,
        side: ReplicaSide,
        compressor: Compressor,
        compression: str,
        batch_size: int,
        lease_ahead_s: float,
        averaged: m.Array,
        push_norm_max: float,
        members: Members,
        collecting: Collecting | None = None,
        own_rate: OwnRate | None = None,
        takes_over: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        """tables: the clients of each table of the method, in shard order. compression: the name of
        the compressor. averaged: float64[n], the model's buffers. collecting: the group of the
        replicas, if they have one. own_rate: the learning rate of the replica's own optimiser, if
        it has one. takes_over: its model is that of another replica, or of `sharing`.
        """
        self.context = context
        self.identity = identity
        self.tables = tables
        self.send_queue = send_queue
        self.side = side
        self.rates = Rates("samples", "push_bytes", "fetch_bytes")
        self.fetcher = Fetcher(tables, send_queue, self.rates)
        self.pacing = Pacing(side, send_queue.limiters)
        self.portions = Portions(batch_size, lease_ahead_s)
        self.bad_gradients = BadGradients(push_norm_max)
        self.writing = Writing(
            context, identity, tables, method.shape, compressor, compression, send_queue,
            self.portions, self.bad_gradients, self.pacing, self.rates, side.parameters,
            self._on_pushed,
        )  # fmt: skip
        self.progress = Progress(lambda: len(members.known))
        self.own_rate = own_rate or OwnRate(0.0)
        side.own_rate = self.own_rate.at
        self.reading = Reading(
            self.fetcher, side, method.shape, self.pacing, self.writing, self.progress
        )
        self.computing = Computing(
            context, identity, self.portions, self.writing, self.bad_gradients, self.pacing,
            self.rates, averaged, self.progress, self.own_rate,
        )  # fmt: skip
        self.engines = Engines(context, self.computing.is_held)
        self.collecting = collecting
        self.asking = Asking(context, identity, members, len(side.parameters), self.rates)
        self.answering = Answering(context, identity, members, side, self.has_model)
        asks = TakingOver(self.asking, side) if takes_over and members.connects else None
        self._taking_over: TakingOver | Sharing | None = asks or sharing
        served = shapes.served(method)
        self._services = {k: one for k, one in self._all_services().items() if k in served}
        self.parked = False
        """Drained: the method will not be resumed."""
        self._leaves = False
        self._run: Generator[Need, Any, None] = side.run()
        self._need: Need | None = None

    def _all_services(self) -> dict[type[Need], Service[Any]]:
        services: dict[type[Need], Service[Any]] = {
            NextData: self.computing,
            NextRows: self.computing,
            Gradient: self.computing,
            Done: self.computing,
            Engine: self.engines,
            OwnStep: self.engines,
            OwnState: self.engines,
        }
        if self.tables:
            services |= {Read: self.reading, Write: self.writing, Settle: self.writing}
        if self.asking.members.connects:
            services[Ask] = self.asking
        if self.collecting is not None:
            services[Collective] = self.collecting
        return services

    @property
    def channels(self) -> list[ShardClient]:
        """The shards of the parameters; none without servers."""
        return self.tables[0] if self.tables else []

    @property
    def service(self) -> Service[Any]:
        """The service of the current need."""
        assert self._need is not None
        return self._services[type(self._need)]

    # ------------------------------------------------------------ the method and its needs

    def advance(self, now: float) -> None:
        """Serve the method's needs for as long as they can be served immediately."""
        self.asking.go_on(now)
        if self.is_paused:
            return
        self.reading.arrived(now)
        self.fetcher.model_changes(self.side.changes_parameters())
        self._place_arrivals()
        self.reading.go_on(now)
        if not self.is_at_work():
            self.answering.serve()
            self.asking.deliver()
        if not self._has_taken_over(now):
            return
        if self._need is None and not self.parked:
            self._resume(None, now)
        while not self.parked:
            if self._has_left():
                self._leave(now)
                continue
            done, value = self.service.poll(now)
            if not done:
                return
            self._resume(value, now)

    def _has_taken_over(self, now: float) -> bool:
        """Whether the method can begin, or never will. Raises JobFailed if none has a model."""
        if self._taking_over is not None and self.computing.draining:
            self.parked = True  # No other process waits for it.
        elif self._taking_over is not None and self._taking_over.advance(now):
            self._taking_over = None
        return self._taking_over is None or self.parked

    def _resume(self, value: Any, now: float) -> None:
        """Pass the method the value of its need, and begin its next one. Raises TypeError for a
        need without a service.
        """
        where = type(self.side).__module__
        try:
            need = self._run.send(value)
        except StopIteration:
            if not self._leaves:
                raise TypeError(f"{where}: run() has returned") from None
            self.parked = True
            if self.collecting is not None:
                self.collecting.cancel()  # The others need not wait for it.
            return
        except TypeError as error:
            if why := outdated.argument(error):
                raise TypeError(f"{where}: {why}") from error
            raise
        if type(need) not in self._services:
            why = shapes.UNDECLARED.get(type(need), "")
            raise TypeError(f"{where}: nothing serves {need!r:.80}{why and ': '}{why}")
        if self._leaves and isinstance(need, Gradient | NextData):
            raise TypeError(f"{where}: leave() asks for data: {need!r:.80}")
        self._need = need
        if not isinstance(need, Gradient | NextData):
            # The method has acted since it was notified that there is no data, so notify it again.
            self.computing.leasing.told_no_data = False
        self.service.begin(need, now)

    def _has_left(self) -> bool:
        """Whether the method requests data again after it was notified that it leaves."""
        waits = isinstance(self._need, Gradient | NextData)
        return waits and self.computing.is_told_of_end and self.computing.ends_here()

    def _leave(self, now: float) -> None:
        """Run the method's `leave`; after it the method is not resumed any more."""
        self._leaves, self._run = True, _resumable(self.side.leave())
        self._resume(None, now)

    def deadline(self) -> float | None:
        """When `advance` has to be called if no event arrives."""
        times = [self.asking.deadline()]
        if self._taking_over is not None and not self.parked:
            times.append(self._taking_over.deadline())
        elif not (self.parked or self.is_paused or self._need is None):
            times.append(self.service.deadline())
        return min((time for time in times if time is not None), default=None)

    def pause(self, now: float) -> bool:
        """Set `is_paused`, which protects the model, unless a gradient is being computed."""
        self.is_paused = not self.is_at_work()
        if self.is_paused:
            self.pacing.waits("", now)
            self.computing.paused(now)
        return self.is_paused

    def phase(self) -> Phase:
        if self.computing.is_computing:
            return Phase("computing")
        if self.is_paused:
            return Phase("evaluating")
        if self.parked:
            return Phase("draining" if self.busy() else "drained")
        if self._taking_over is not None:
            return self._taking_over.phase()
        return self.service.phase() if self._need is not None else Phase("starting")

    def has_model(self) -> bool:
        """Whether this replica holds a model of the run; a joining replica receives it first."""
        has_own = self.collecting is None or self.collecting.has_model
        return has_own and self._taking_over is None

    def stuck_s(self, now: float) -> float:
        """How long the current batch, evaluation or operation of the engine has taken, if far
        longer than it should, else 0.
        """
        stuck_s = self.computing.stuck_s(now, evaluates=self.is_paused)
        return stuck_s or self.engines.stuck_s(now)

    def is_at_work(self) -> bool:
        """Whether a computation uses the model at the moment."""
        return self.computing.is_computing or self.engines.is_at_work

    def busy(self) -> bool:
        """Whether anything of this replica is not settled yet."""
        is_noted = not self.context.retries.count("portion")
        return self.writing.busy() or not is_noted or self.asking.is_open()

    # ------------------------------------------------------------ events

    def _place_arrivals(self) -> None:
        """Never while a gradient is being computed: it would mix two versions of parameters."""
        if not self.is_at_work():
            self.reading.place()

    def on_computed(self, event: Computed, now: float) -> None:
        self.computing.on_computed(event, now)
        self.side.step_s = self.computing.batch_s

    def on_lease(self, lease: m.Lease, now: float) -> None:
        if not self.tables:
            self.progress.told(lease.samples)
        self.computing.leasing.on_lease(lease, now)

    def on_ack(self, ack: m.Ack, now: float) -> None:
        """A server has acked a push."""
        for number in self.writing.on_ack(ack, now):
            self.computing.report_done(self.portions.settled(number), now)

    def _on_pushed(self) -> None:
        self.progress.pushed()
        self._push_buffers()

    def on_joined_again(self, shard: int) -> None:
        if shard == 0 and self.writing.steps_pushed:
            self._push_buffers()

    def _push_buffers(self) -> None:
        me, samples = self.identity, self.rates.total["samples"]
        averaged = self.computing.averaged
        if self.channels and averaged.size and samples:  # without: those of a new model
            buffers = m.PushBuffers(me.slot, me.epoch, samples, averaged)
            self.context.send(self.channels[0].peer, buffers)

    # ------------------------------------------------------------ figures

    def metrics(self, now: float) -> dict[str, Any]:
        if self._taking_over is not None:
            return {}  # A replica that reports a step is running, and others ask it for the model.
        values: dict[str, Any] = {"step": self.writing.steps, **self.rates.report(now)}
        values |= self.writing.metrics()
        values |= self.fetcher.latency.quantiles_ms("fetch")
        values |= self.pacing.metrics(now)
        if self.computing.loss is not None:
            values["loss"] = round(self.computing.loss, 6)
        if self.computing.metrics:
            values["task"] = dict(self.computing.metrics)
        if self.own_rate.factor is not None:
            values["inner_lr"] = self.own_rate.at(self.progress.samples)
        values["repeated"] = self.context.retries.repeated
        values["request"] = self.computing.leasing.number
        # 0 means that the coordinator has confirmed all work that this replica has done.
        values["portions"] = self.portions.not_done() + self.context.retries.count("portion")
        if self.asking.members.connects:
            values["unanswered"] = self.asking.unanswered
            values["answered"] = self.answering.served
        if figures := self.side.figures():
            values["method"] = figures
        if self.collecting is not None:
            group = self.collecting
            values["group"] = [group.generation, len(group.slots), group.is_made]
            values["sums"] = self.collecting.number
        values["nonfinite_steps"] = self.bad_gradients.steps
        return values


def _resumable(needs: Iterable[Need]) -> Generator[Need, Any, None]:
    """The same needs as a generator; a plain iterable ignores the results."""
    return needs if isinstance(needs, Generator) else (need for need in needs)
