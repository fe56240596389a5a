"""What a worker and its replica know of each other, and what both know of who computes.

    Worker --(Replica, Evaluable, Savable)--> Training --(StepSource)--> who computes the steps
    Worker <------------(Host)--------------- Training

`Training` runs the method and serves what does not depend on who computes: reads, writes, questions
to other replicas, sums. A `StepSource` serves the needs for data and gradients: `Computing` leases
data from the coordinator and has the task's batches computed. Another one, such as a training loop
of the user, is given to the worker instead; neither `Worker` nor `Training` changes for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dlctl.algorithms.base import ReplicaSide
from dlctl.algorithms.needs import Need
from dlctl.roles.protocol.effects import (
    AnswerWanted,
    Computed,
    EngineRan,
    GroupFailed,
    GroupJoined,
    GroupWaits,
    Reduced,
    RowsNamed,
    StoreOpened,
)
from dlctl.roles.protocol.loop_effects import DataWanted, LoopStepped
from dlctl.roles.worker.accounts import Accounts
from dlctl.roles.worker.fetching import Fetcher
from dlctl.roles.worker.leases import Portion
from dlctl.roles.worker.links import Links
from dlctl.roles.worker.services.asking import Asking
from dlctl.roles.worker.services.base import Phase, Service
from dlctl.roles.worker.services.writing import Writing
from dlctl.roles.worker.settings import WorkTerms
from dlctl.wire import messages as m
from dlctl.wire.machine import Event, Peer
from dlctl.wire.messages import Array

FROM_COORDINATOR: tuple[type[m.Message], ...] = (m.Lease, m.Group)
FROM_SHARDS: tuple[type[m.Message], ...] = (m.Ack, m.Parameters, m.SparseParameters)
"""The messages that a worker passes on to its replica; before it has begun they are dropped."""
OF_GROUP = (StoreOpened, GroupJoined, Reduced, GroupWaits, GroupFailed)
OF_STEPS = (Computed, RowsNamed, EngineRan, LoopStepped, DataWanted, AnswerWanted)
"""Likewise the events."""


class ReplicaHost(Protocol):
    """The worker, as its replica sees it."""

    @property
    def links(self) -> Links:
        """How to reach the coordinator, the servers and the other replicas."""
        ...

    @property
    def terms(self) -> WorkTerms: ...

    def leave_poisoned(self, error: str, detail: str) -> None:
        """The replica's results are unusable: leave the run without being replaced."""
        ...


class ReplicaAtWork(Protocol):
    """A replica that has begun, as its worker sees it."""

    def on_message(self, message: m.Message, now: float) -> None:
        """One of `FROM_COORDINATOR` or `FROM_SHARDS`; also `Peers`, `Joined` and `Buffers`, which
        the worker has handled first. Raises RemoteProtocolError if it is invalid.
        """
        ...

    def cut_anew(self) -> None:
        """The shards have other parts of the model: what is being read is asked anew."""
        ...

    def on_ask(self, peer: Peer, ask: m.PeerRequest) -> None:
        """Another replica asks. Raises RemoteProtocolError, as the next one does."""
        ...

    def on_answer(self, peer: Peer, answer: m.PeerReply, now: float) -> None: ...

    def on_event(self, event: Event, now: float) -> None:
        """Handle an event, one of `OF_GROUP` or `OF_STEPS`, or `BuffersLoaded`."""
        ...

    def advance(self, now: float) -> None:
        """Go on for as long as nothing has to be waited for; to be called after every event. Raises
        JobFailed.
        """
        ...

    def deadline(self) -> float | None:
        """When `advance` has to be called if no event arrives."""
        ...

    def drain(self) -> None:
        """Stop at the end of the current portion."""
        ...

    def phase(self) -> Phase: ...

    def stuck_s(self, now: float) -> float:
        """How long the current batch, evaluation or operation takes, if far too long, else 0."""
        ...

    def long_s(self, now: float) -> float:
        """How long the current batch has taken, if longer than usual, else 0."""
        ...

    def metrics(self, now: float) -> dict[str, Any]:
        """The replica's figures for the worker's report."""
        ...


class _Model(Protocol):
    """The model of a replica."""

    @property
    def side(self) -> ReplicaSide: ...

    @property
    def averaged(self) -> Array:
        """float64[n], the averaged buffers."""
        ...

    def has_model(self) -> bool:
        """Whether this replica holds a model of the run; a joining one receives it first."""
        ...


class Evaluable(_Model, Protocol):
    """A replica, as an evaluation sees it."""

    @property
    def links(self) -> Links: ...

    @property
    def fetcher(self) -> Fetcher: ...

    @property
    def asking(self) -> Asking: ...

    @property
    def parked(self) -> bool:
        """The replica is drained: the method will not be resumed."""
        ...

    def pause(self, now: float) -> bool:
        """Protect the model until `resume`, unless a step is being computed. Whether it is."""
        ...

    def resume(self) -> None: ...


class Savable(_Model, Protocol):
    """A replica, as a save sees it."""

    @property
    def is_paused(self) -> bool:
        """An evaluation is running, possibly with other values in the model's place."""
        ...

    def is_at_work(self) -> bool:
        """Whether a computation uses the model at the moment."""
        ...

    def hold(self, holds: bool) -> None:
        """Whether to begin no step while all earlier ones are pushed."""
        ...

    def steps_made(self) -> int: ...

    def has_unpushed_steps(self) -> bool:
        """Whether there are steps that are not completely in pushes."""
        ...


class StepSource(Protocol):
    """Who computes the steps of a replica, and from which data."""

    averaged: Array
    """float64[n], the model's buffers after the newest step."""
    draining: bool
    """Whether `drain` was called."""
    holds: bool
    """Set while a save waits: no step is begun while all earlier ones are pushed."""

    def drain(self) -> None:
        """The replica leaves: it ends where no data is partly processed."""
        ...

    def recall(self) -> None:
        """The model is needed for something else, as soon as a step is complete. Otherwise the
        computation may go on for as many steps as the method wants in a row (`Gradient.more`).
        """
        ...

    def can_stop(self) -> bool:
        """Whether `stop` has any effect, so that it is worth while to find out when it is due."""
        ...

    def stop(self) -> None:
        """The gradient is not needed any more: end its computation as soon as possible, and resume
        the method with None. Nothing of the batch counts; it is computed next.
        """
        ...

    def services(self) -> Mapping[type[Need], Service[Any]]:
        """The services for data, gradients and the replica's own optimiser, as far as this source
        has them. The replica fails at a need that nothing serves.
        """
        ...

    def on_event(self, event: Event, now: float) -> None:
        """Handle the result of a computation, one of `OF_STEPS`."""
        ...

    def on_lease(self, lease: m.Lease, now: float) -> None: ...

    def on_done(self, done: list[Portion], now: float) -> None:
        """All steps of these portions are in pushes that all shards have settled."""
        ...

    def acted(self) -> None:
        """The method has begun another need: if there is no data, it is notified again."""
        ...

    def has_ended(self) -> bool:
        """Whether the method was notified that no data follows, because the replica leaves."""
        ...

    def is_computing(self) -> bool:
        """Whether a gradient is being computed."""
        ...

    def is_at_work(self) -> bool:
        """Whether any computation uses the model."""
        ...

    def paused(self, now: float) -> None:
        """Start the time of the current work over: an evaluation is running from now on."""
        ...

    def stuck_s(self, now: float, *, evaluates: bool) -> float: ...

    def long_s(self, now: float) -> float: ...

    def metrics(self, now: float) -> dict[str, Any]: ...


MakeSteps = Callable[[Links, WorkTerms, Accounts, Writing, ReplicaSide, Array], StepSource]
"""Makes the source of a replica's steps; the last argument are the buffers of its first model."""
