"""Bugs of the worker: training, pushes, fetches, portions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from planting import Patch, mutant

from dlctl.algorithms.needs import Settle
from dlctl.roles.protocol.loop_effects import GiveData
from dlctl.roles.worker.fetching import Fetcher
from dlctl.roles.worker.joining import Joining
from dlctl.roles.worker.leases import Portions
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.received_slice import Basis
from dlctl.roles.worker.services.asking import Asking
from dlctl.roles.worker.services.computing import Computing
from dlctl.roles.worker.services.engines import Engines
from dlctl.roles.worker.services.looping import Looping
from dlctl.roles.worker.services.portion_reports import PortionReports
from dlctl.roles.worker.services.reading import OneRead
from dlctl.roles.worker.services.writing import Writing
from dlctl.roles.worker.shard_client import ShardClient
from dlctl.roles.worker.training import Training
from dlctl.roles.worker.worker import Worker
from dlctl.shards.history import History
from dlctl.wire import messages as m


@mutant("a worker calls its portion done when it is pushed, not when it is settled", "AcksChecker")
def done_before_ack(patch: Patch) -> None:
    honest = Training._on_pushed

    def on_pushed(self):
        honest(self)
        self.steps.on_done(self.accounts.portions.settled(self.writing.newest), 0.0)

    patch.setattr(Training, "_on_pushed", on_pushed)


@mutant("the residual is emptied when the data ends", "LedgerChecker", scenario="downpour-topk")
def residual_is_dropped_at_the_end(patch: Patch) -> None:
    honest = Worker._on_shutdown

    def on_shutdown(self, message, now):
        if self.training is not None:
            self.training.side.residual[:] = 0
        honest(self, message, now)

    patch.setitem(Worker._FROM_COORDINATOR, m.Shutdown, on_shutdown)


@mutant("who waits for the next step takes the one that there is", "ClockChecker", scenario="sync")
def the_next_step_is_not_waited_for(patch: Patch) -> None:
    honest = Fetcher.start
    patch.setattr(Fetcher, "start", lambda self, clock_min, **how: honest(self, 0, **how))


@mutant("parameters are put into the model under a gradient", "AssertionError")
def place_at_once(patch: Patch) -> None:
    patch.setattr(Training, "_place_arrivals", lambda self: self.reading.place())


@mutant("staleness counts from parameters that came after the gradient", "StalenessChecker")
def too_fresh(patch: Patch) -> None:
    honest = ShardClient.push

    def push(self, *arguments):
        self.base_version = self.basis.version
        return honest(self, *arguments)

    patch.setattr(ShardClient, "push", push)


@mutant(
    "what has changed is put on the model as it is, with the worker's own steps in it",
    "FetchesChecker", scenario="downpour-topk",
)  # fmt: skip
def local_steps_stay(patch: Patch) -> None:
    honest = Basis.place

    def place(self, arrived, model, *, keep):
        own = model.copy()
        honest(self, arrived, model, keep=keep)
        if arrived.where is not None:
            untouched = np.setdiff1d(np.arange(model.size), arrived.where)
            model[untouched] = own[untouched]

    patch.setattr(Basis, "place", place)


@mutant(
    "nobody compares terms, and a server that comes back takes what it has not seen for "
    "nothing", "FetchesChecker", scenario="recovery", seeds=30, first=2,
)  # fmt: skip
def shard_terms_are_not_compared(patch: Patch) -> None:
    honest_message, honest_since = Fetcher._message, History.since

    def message(self, fetched, client, again):
        asked = honest_message(self, fetched, client, again)
        return replace(asked, have_term=asked.have_term and client.link.term)

    def since(self, base, version, w):
        known = honest_since(self, base, version, w)
        if known is not None:
            return known
        return honest_since(self, version - len(self._updates), version, w)

    patch.setattr(Fetcher, "_message", message)
    patch.setattr(History, "since", since)
    patch.setattr(Basis, "fits", lambda self, arrived: True)


@mutant("a worker that a shard does not know any more does not join it again", "LivenessChecker")
def unknown_for_good(patch: Patch) -> None:
    patch.setattr(Joining, "on_join_again", lambda self, message, now: None)


@mutant(
    "a read is answered by an older one that waits for a smaller clock", "AssertionError",
    scenario="toys",
)  # fmt: skip
def an_older_read_answers(patch: Patch) -> None:
    patch.setattr(OneRead, "serves", lambda self, other: True)


@mutant(
    "what is done without a push counts before it is computed", "SamplesChecker", scenario="toys",
    seeds=20, first=22,
)  # fmt: skip
def done_before_the_step(patch: Patch) -> None:
    honest = Portions.done_now

    def done_now(self, steps, but):
        done = honest(self, steps, but)
        if self.current is not None and self.current.next_number:
            done.append(self.current)
        return done

    patch.setattr(Portions, "done_now", done_now)


@mutant(
    "the newest steps are done although they are left out", "AcksChecker", scenario="ways", first=4
)
def steps_left_out_are_done(patch: Patch) -> None:
    honest = PortionReports.done_without_push
    patch.setattr(PortionReports, "done_without_push", lambda self, but, now: honest(self, 0, now))


@mutant(
    "who waits for its push to be settled is told what became of the one before it",
    "LedgerChecker", scenario="ways", first=4,
)  # fmt: skip
def an_older_push_is_told_of(patch: Patch) -> None:
    honest = Writing.poll

    def poll(self, now):
        return (True, self._receipt) if isinstance(self._need, Settle) else honest(self, now)

    patch.setattr(Writing, "poll", poll)


@mutant(
    "who still waits for the model says that it trains", "LivenessChecker",
    scenario="serverless", seeds=1, first=67,
)  # fmt: skip
def trains_without_model(patch: Patch) -> None:
    honest = Training.metrics

    def metrics(self, now):
        return {"step": 0, **honest(self, now)}

    patch.setattr(Training, "metrics", metrics)


@mutant(
    "a replica makes a step of its own while its optimiser is being saved", "AssertionError",
    scenario="serverless", first=62,
)  # fmt: skip
def stepped_while_it_is_saved(patch: Patch) -> None:
    honest = Engines.__init__
    patch.setattr(
        Engines, "__init__", lambda self, context, _: honest(self, context, lambda: False)
    )


@mutant(
    "what another replica has answered is put into the model under a gradient", "AssertionError",
    scenario="serverless", first=1,
)  # fmt: skip
def pulled_under_a_gradient(patch: Patch) -> None:
    honest = Training.advance

    def advance(self, now):
        self.asking.deliver()
        honest(self, now)

    patch.setattr(Training, "advance", advance)


@mutant(
    "an answer of a process that was replaced is used", "AnswersChecker", scenario="toys",
    first=22, seeds=10,
)  # fmt: skip
def a_replaced_replica_answers(patch: Patch) -> None:
    def on_answer(self, peer, answer, now):
        for number, question in list(self._open.items()):
            if question.slot == answer.slot and not answer.error:
                self.context.retries.drop(("ask", number))
                self.newest = answer.payload.arrays
                self._open.pop(number).then(self.newest)

    patch.setattr(Asking, "on_answer", on_answer)
    patch.setattr(PeerMembers, "has", lambda self, slot, term: True)


@mutant(
    "a worker passes over the first batch of a portion, whose gradient it has stopped",
    "TotalsChecker", scenario="stale-gradients",
)  # fmt: skip
def a_stopped_batch_is_passed_over(patch: Patch) -> None:
    honest = Computing._on_computed

    def on_computed(self, event, now):
        portion = self._running[0]
        honest(self, event, now)
        if event.is_stopped:
            portion.next_number = max(portion.next_number, 1)

    patch.setattr(Computing, "_on_computed", on_computed)


@mutant("a loop's portion is done when it was delivered", "AcksChecker", scenario="loops")
def delivered_is_done(patch: Patch) -> None:
    honest = Looping._deliver

    def deliver(self, portion, samples, now):
        honest(self, portion, samples, now)
        done, self.portions._computed = self.portions._computed, []
        self.on_done(done, now)

    patch.setattr(Looping, "_deliver", deliver)


@mutant("a loop that waits in the middle of a group is not notified that no data follows",
        "LivenessChecker", scenario="loops")  # fmt: skip
def an_open_group_waits_for_ever(patch: Patch) -> None:
    honest = Looping.on_lease

    def on_lease(self, lease, now):
        honest(self, lease, now)
        if lease.start == lease.stop:
            effects = self.context._effects
            effects[:] = [each for each in effects if not isinstance(each, GiveData)]

    patch.setattr(Looping, "on_lease", on_lease)
