"""A running replica: serves the needs of the method's replica side.

The method is a generator that always waits for exactly one need; after every event `advance` polls
the service of that need. The services handle what a method need not care about: leases, the window
of pushes, parameters that arrive while a gradient is being computed (they are installed between two
steps), discarded batches, and draining when the data ends. Who computes the steps is a `StepSource`
(`interface.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from dlctl import outdated
from dlctl.algorithms import shapes
from dlctl.algorithms.base import Method, ReplicaSide
from dlctl.algorithms.needs import Ask, Collective, Gradient, Need, NextData, Read, Settle, Write
from dlctl.model.parts import NOBODY
from dlctl.roles.protocol.effects import AnswerWanted, BuffersLoaded
from dlctl.roles.worker.accounts import Accounts
from dlctl.roles.worker.fetching import Fetcher
from dlctl.roles.worker.interface import OF_GROUP, MakeSteps, ReplicaHost
from dlctl.roles.worker.services.answer_runner import AnswerRunner
from dlctl.roles.worker.services.asking import Answering, Asking
from dlctl.roles.worker.services.base import Phase, Service
from dlctl.roles.worker.services.collecting import Collecting
from dlctl.roles.worker.services.computing import Computing
from dlctl.roles.worker.services.handed_on import HandedOn
from dlctl.roles.worker.services.reading import Reading
from dlctl.roles.worker.services.remote import Remote
from dlctl.roles.worker.services.stale_watch import StaleWatch
from dlctl.roles.worker.services.taking_over import Sharing, TakingOver
from dlctl.roles.worker.services.writing import Writing
from dlctl.util.names import LINKS
from dlctl.util.text import DISCARDED, REFUSED
from dlctl.wire import messages as m
from dlctl.wire.machine import Event, Peer


class Origin(NamedTuple):
    """The model that a replica begins with."""

    averaged: m.Array
    """float64[n], the buffers of the model."""
    takes_over: bool = False
    """The model is not the run's yet, and no server has that: another replica does."""
    mark: m.Array | None = None
    """`ModelBuilt.mark`, if the model is in memory that other replicas share."""


class Training:
    """One replica. It drives the method on behalf of the worker role."""

    def __init__(
        self,
        host: ReplicaHost,
        method: Method,
        side: ReplicaSide,
        origin: Origin,
        *,
        collecting: Collecting | None = None,
        steps: MakeSteps = Computing,
        asks: int = NOBODY,
    ) -> None:
        """collecting: the group of the replicas, if they have one. steps: makes who computes. asks:
        the slot of the worker that the computations ask, if they do.
        """
        self.host = host
        self.links, self._terms = host.links, host.terms
        self.side = side
        context, me, members = self.links.context, self.links.identity, self.links.members
        terms, accounts = self._terms, Accounts.opened(self.links, self._terms, side)
        self.accounts = accounts
        self.fetcher = Fetcher(self.links.tables, self.links.send_queue, accounts.rates)
        self.writing = Writing(
            self.links, terms, accounts, method.shape, side.parameters, self._on_pushed
        )
        self._stale_watch = StaleWatch(self.fetcher)
        side.own_rate = terms.own_rate.at
        self.reading = Reading(self.fetcher, accounts, self.writing, side)
        self.steps = steps(self.links, terms, accounts, self.writing, side, origin.averaged)
        self.handed_on: HandedOn | None = None
        if side.hands_on_buffers(side.options) and origin.averaged.size and self.links.channels:
            self.handed_on = HandedOn(self.links, self.steps)
            self.reading.handed_on = self.writing.handed_on = self.handed_on
        self.collecting = collecting
        serves_on = method.shape.serves_on
        size = len(side.parameters)
        self.asking = Asking(context, me, members, size, accounts.rates, serves_on)
        self._remote = Remote(context, self.asking, members, asks) if asks != NOBODY else None
        served = shapes.served(method)
        self._services = {k: one for k, one in self._all_services().items() if k in served}
        self._serving = AnswerRunner(self._services)
        self.answering = Answering(
            context, me, members, side, self._hands_out_model, self._serving, serves_on
        )
        self._taking_over = self._source_of(origin)
        self.is_paused = False
        self.parked = False
        self._leaves = False
        self._run: Generator[Need, Any, None] = side.run()
        self._need: Need | None = None

    def _source_of(self, origin: Origin) -> TakingOver | Sharing | None:
        """Where it gets the run's model from; None: it has that, or the group passes it on."""
        if origin.takes_over and self.links.members.connects:
            return TakingOver(self.asking, self.side)
        if origin.takes_over and origin.mark is not None:
            return Sharing(origin.mark)
        return None

    def _all_services(self) -> dict[type[Need], Service[Any]]:
        services = {**self.steps.services()}
        if self.links.tables:
            services |= {Read: self.reading, Write: self.writing, Settle: self.writing}
        if self.links.members.connects:
            services[Ask] = self.asking
        if self.collecting is not None:
            services[Collective] = self.collecting
        return services

    @property
    def service(self) -> Service[Any]:
        """The service of the current need."""
        assert self._need is not None
        return self._services[type(self._need)]

    # ------------------------------------------------------------ the method and its needs

    def advance(self, now: float) -> None:
        """Serve the method's needs for as long as they can be served immediately."""
        self._advance(now)
        self._leave_if_poisoned()

    def _advance(self, now: float) -> None:
        self.asking.advance(now)
        if self._remote is not None:
            self._remote.advance(now)
        if self.is_paused:
            return
        self.reading.arrived(now)
        self.fetcher.model_changes(self.side.changes_parameters())
        self._place_arrivals()
        self.reading.advance(now)
        self._serving.advance(now)
        if not self.is_at_work():
            self.answering.serve(now)
            self._serving.advance(now)
            self.asking.deliver()
        elif self.answering.is_asked() or self.asking.has_answers() or self.reading.is_here():
            self.steps.recall()
        if self._stale_watch.is_stale():
            self._stale_watch.end()
            self.steps.stop()
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
        if self._taking_over is not None and self.steps.draining:
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
            self.steps.acted()
        stale_after = need.stale_after if isinstance(need, Gradient) else 0
        if stale_after and not self.links.tables:
            raise TypeError(
                f"{where}: Gradient(stale_after={stale_after}) counts the updates of servers, and "
                "this method has none: leave it out"
            )
        self.service.begin(need, now)
        if stale_after and self.steps.can_stop():
            self._stale_watch.begin(stale_after)
        else:
            self._stale_watch.end()

    def _has_left(self) -> bool:
        """Whether the method requests data again after it was notified that it leaves."""
        return isinstance(self._need, Gradient | NextData) and self.steps.has_ended()

    def _leave(self, now: float) -> None:
        """Run the method's `leave`; after it the method is not resumed any more."""
        self._leaves, self._run = True, _resumable(self.side.leave())
        self._resume(None, now)

    def _leave_if_poisoned(self) -> None:
        bad, terms = self.accounts.bad_gradients, self._terms
        if bad.steps_in_row >= terms.nonfinite_steps_max:
            self.host.leave_poisoned(
                f"{DISCARDED} for {bad.steps_in_row} steps in a row",
                f"last: {bad.last}. A smaller lr or inner.lr may help; nothing was pushed.",
            )
        elif bad.pushes_in_row >= terms.refused_pushes_max:
            self.host.leave_poisoned(
                f"{bad.pushes_in_row} {REFUSED}: {bad.reason}",
                f"they were of {bad.last}; the servers' values are unchanged.",
            )

    # ------------------------------------------------------------ what the worker asks

    def deadline(self) -> float | None:
        times = [self.asking.deadline(), self._serving.deadline()]
        if self._taking_over is not None and not self.parked:
            times.append(self._taking_over.deadline())
        elif not (self.parked or self.is_paused or self._need is None):
            times.append(self.service.deadline())
        return min((time for time in times if time is not None), default=None)

    def phase(self) -> Phase:
        if self._remote is not None and self._remote.waits:
            return self._remote.phase()
        if self.steps.is_computing():
            return Phase("computing")
        if self.is_paused:
            return Phase("evaluating")
        if self.parked:
            return Phase("draining" if self.busy() else "drained")
        if self._taking_over is not None:
            return self._taking_over.phase()
        return self.service.phase() if self._need is not None else Phase("starting")

    def stuck_s(self, now: float) -> float:
        if self._remote is not None and self._remote.waits:
            self.steps.paused(now)  # That is not the task's time.
        return self.steps.stuck_s(now, evaluates=self.is_paused)

    def long_s(self, now: float) -> float:
        return self.steps.long_s(now)

    def busy(self) -> bool:
        """Whether anything of this replica is not settled yet."""
        is_noted = not self.links.context.retries.count("portion")
        busy = self.writing.busy() or self._serving.is_busy
        return busy or not is_noted or self.asking.is_open()

    @property
    def averaged(self) -> m.Array:
        return self.steps.averaged

    def has_model(self) -> bool:
        has_own = self.collecting is None or self.collecting.has_model
        return has_own and self._taking_over is None

    def _hands_out_model(self) -> bool:
        """Whether other replicas get its model; that of a party stays there."""
        return not self.side.role and self.has_model()

    def is_at_work(self) -> bool:
        return self.steps.is_at_work()

    def steps_made(self) -> int:
        return self.writing.steps

    def has_unpushed_steps(self) -> bool:
        return self.side.is_in_step or self.writing.has_unpushed_steps()

    # ------------------------------------------------------------ what the worker tells

    def pause(self, now: float) -> bool:
        self.is_paused = not self.is_at_work()
        if not self.is_paused:
            self.steps.recall()
        else:
            self.accounts.pacing.waits("", now)
            self.steps.paused(now)
        return self.is_paused

    def resume(self) -> None:
        self.is_paused = False

    def hold(self, holds: bool) -> None:
        self.steps.holds = holds

    def drain(self) -> None:
        self.steps.drain()

    def cut_anew(self) -> None:
        self.fetcher.cut_anew()

    def on_message(self, message: m.Message, now: float) -> None:
        match message:
            case m.Lease():
                if not self.links.tables:
                    self.accounts.progress.on_total(message.samples)
                self.steps.on_lease(message, now)
            case m.Ack():
                for number in self.writing.on_ack(message, now):
                    self.steps.on_done(self.accounts.portions.settled(number), now)
            case m.Parameters() | m.SparseParameters():
                self.fetcher.on_parameters(message, now)
            case m.Group() if self.collecting is not None:
                self.collecting.on_group(message, now)
            case m.Buffers() if self.handed_on is not None:
                self.handed_on.on_buffers(message)
            case m.Peers():
                self.side.members = self.links.members.slots
            case m.Joined(shard=0) if self.writing.steps_pushed:
                self._push_buffers()

    def on_ask(self, peer: Peer, ask: m.PeerRequest) -> None:
        self.answering.on_ask(peer, ask)

    def on_answer(self, peer: Peer, answer: m.PeerReply, now: float) -> None:
        self.asking.on_answer(peer, answer, now)

    def on_event(self, event: Event, now: float) -> None:
        if isinstance(event, AnswerWanted):
            assert self._remote is not None
            self._remote.want(event.op, self.side.question(event.batch, event.arrays), now)
        elif isinstance(event, BuffersLoaded):
            if self.handed_on is not None:
                self.handed_on.on_loaded()
        elif not isinstance(event, OF_GROUP):
            self.steps.on_event(event, now)
        elif self.collecting is not None:
            self.collecting.on_event(event, now)

    def _place_arrivals(self) -> None:
        """Never while a gradient is being computed: it would mix two versions of parameters."""
        if not self.is_at_work():
            self.reading.place()

    def _on_pushed(self) -> None:
        self.accounts.progress.pushed()
        self._push_buffers()

    def _push_buffers(self) -> None:
        me, samples = self.links.identity, self.accounts.rates.total["samples"]
        channels, averaged = self.links.channels, self.averaged
        if self.handed_on is not None:
            return  # They are in the pushes.
        if channels and averaged.size and samples:  # without: those of a new model
            buffers = m.PushBuffers(me.slot, me.term, samples, averaged)
            self.links.context.send(channels[0].peer, buffers)

    # ------------------------------------------------------------ figures

    def metrics(self, now: float) -> dict[str, Any]:
        if self._taking_over is not None:
            return {}  # A replica that reports a step is running, and others ask it for the model.
        accounts, retries = self.accounts, self.links.context.retries
        values: dict[str, Any] = {"step": self.writing.steps, **accounts.rates.report(now)}
        if self._terms.counts_links:
            values[LINKS] = {
                peer: [of.get("push_bytes", 0), of.get("fetch_bytes", 0)]
                for peer, of in accounts.rates.of_peers.items()
            }
        if self._terms.measures_links:
            values |= self.links.flights.report()
        values |= self.writing.metrics()
        values |= self.fetcher.latency.quantiles_ms("fetch")
        values |= accounts.pacing.metrics(now)
        values |= self.steps.metrics(now)
        values["repeated"] = retries.repeated
        # 0 means that the coordinator has confirmed all work that this replica has done.
        values["portions"] = accounts.portions.not_done() + retries.count("portion")
        if self.links.members.connects:
            values["unanswered"] = self.asking.unanswered
            values["answered"] = self.answering.served
        if figures := self.side.figures():
            values["method"] = figures
        if self.collecting is not None:
            group = self.collecting
            values["group"] = [group.generation, len(group.slots), group.is_made]
            values["sums"] = self.collecting.number
        values["nonfinite_steps"] = accounts.bad_gradients.steps
        return values


def _resumable(needs: Iterable[Need]) -> Generator[Need, Any, None]:
    """The same needs as a generator; a plain iterable ignores the results of its needs."""
    return needs if isinstance(needs, Generator) else (need for need in needs)
