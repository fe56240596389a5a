"""Jobs, and ways to look into simulated runs, shared by the tests beside this file."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Literal

import numpy as np

from dlctl import registry
from dlctl.compress.values import Precision
from dlctl.job import config
from dlctl.jobfile import effective_options
from dlctl.model.flat import slice_bounds
from dlctl.records.memory import Memory
from dlctl.roles.coordinator.records import Remember
from dlctl.roles.server.commits import Commit
from dlctl.sim.checkers import (
    AcksChecker,
    Book,
    Checker,
    FetchesChecker,
    LeasesChecker,
    LedgerChecker,
    LivenessChecker,
    NothingLeft,
    SamplesChecker,
    SavedChecker,
    StalenessChecker,
    TermsChecker,
    TotalsChecker,
)
from dlctl.sim.objectives import Batch, LeastSquares, Ledger, batch_rows
from dlctl.sim.simulation import Simulation
from dlctl.wire.machine import Send
from dlctl.wire.messages import (
    Array,
    Assign,
    Decided,
    Json,
    NewBounds,
    Push,
    Recut,
    Save,
    Saved,
    Shutdown,
)

ACCOUNT = ("sgd", {"lr": 1.0})
"""The optimiser with which final weights are the count of applications."""


def _compression(name: str, options: dict[str, Any]) -> config.Choice:
    """The models of the tests are small, and would travel whole."""
    known = registry.load("compressors", name).Options.__dataclass_fields__
    least = {"dense_below": 0} if "dense_below" in known else {}
    return config.Choice(name=name, options=least | options)


def _inner(
    algorithm: tuple[str, dict[str, Any]],
    chosen: tuple[str, dict[str, Any]] | None,
    lr: float | None,
) -> config.Choice:
    """All options, as a job file that was read has them; the method's own if none is chosen."""
    choice = registry.load("algorithms", algorithm[0]).of(algorithm[1]).inner
    if choice.name != "none" and (choice.name != "sgd" or choice.options.keys() != {"lr"}):
        choice = config.Choice(name="sgd", options={"lr": 0.01})  # All others need torch.
    if lr is not None:
        chosen = ("sgd", {"lr": lr}) if lr else ("none", {})
    if chosen is not None:
        choice = config.Choice(name=chosen[0], options=chosen[1])
    options = effective_options("inner_optimizers", choice)
    return config.Choice(name=choice.name, options=options)


def job_file(
    workers: int = 1,
    servers: int = 1,
    *,
    algorithm: tuple[str, dict[str, Any]] = ("downpour", {}),
    optimizer: tuple[str, dict[str, Any]] = ("sgd", {"lr": 0.1}),
    compression: tuple[str, dict[str, Any]] = ("none", {}),
    batch_size: int = 8,
    portion_batches: int = 4,
    seed: int = 0,
    push: str = "off",
    fetch: str = "off",
    checkpoint_s: float = 0.0,
    evaluate_epochs: float = 0.0,
    evaluate_steps: int = 0,
    restarts_max: int = 8,
    workers_min: int | None = None,
    workers_max: int | None = None,
    nonfinite_steps_max: int = 20,
    durability: Literal["process", "none", "disk"] = "process",
    fetch_values: Precision = "float32",
    timeouts: dict[str, float] | None = None,
    hosts: tuple[config.Host, ...] = (),
    inner: tuple[str, dict[str, Any]] | None = None,
    schedule: config.Schedule | None = None,
    gradient: config.Gradients | None = None,
    parameters: tuple[config.ParameterGroup, ...] = (),
    average: config.Average | None = None,
    has_loop: bool = False,
    parties: tuple[config.Party, ...] = (),
    **stop: Any,
) -> config.JobFile:
    """A job as the tests need it; `stop` is { epochs = 2 } unless something else is given. Among
    the options of the algorithm, "inner_lr" is the rate of SGD in the replicas; 0: of none.
    """
    options = dict(algorithm[1])
    inner_choice = _inner((algorithm[0], options), inner, options.pop("inner_lr", None))
    return config.JobFile(
        job=config.Job(
            name="simulated",
            task="" if has_loop else "none",
            script="loop.py" if has_loop else "",
            seed=seed,
            stop=config.Stop(**(stop or {"epochs": 2.0})),
        ),
        algorithm=config.Choice(name=algorithm[0], options=options),
        optimizer=config.Choice(name=optimizer[0], options=optimizer[1]),
        inner=inner_choice,
        schedule=schedule or config.Schedule(),
        gradient=gradient or config.Gradients(),
        parameters=parameters,
        average=average or config.Average(),
        compression=_compression(*compression),
        servers=config.Servers(count=servers, durability=durability, fetch_values=fetch_values),
        workers=config.Workers(
            count=workers,
            min=workers_min,
            max=workers_max,
            batch_size=batch_size,
            restarts_max=restarts_max,
            nonfinite_steps_max=nonfinite_steps_max,
        ),
        data=config.Data(portion_batches=portion_batches),
        limits=config.Limits(push=push, fetch=fetch),
        checkpoints=config.Checkpoints(every_s=checkpoint_s),
        evaluation=config.Evaluation(every_epochs=evaluate_epochs, every_steps=evaluate_steps),
        hosts=hosts,
        parties=parties,
        timeouts=config.Timeouts(**(timeouts or {})),
    )


def ledger_checkers(
    problem: Ledger,
    epochs: int,
    *,
    once: bool,
    averages: bool = False,
    shares: bool = False,
    in_step: bool = True,
    forgets: bool = False,
    totals: bool = False,
    heal_at_s: float = 10.0,
) -> tuple[Checker, ...]:
    """Everything that must be true of a run of `problem`; `averages`: the method is a barrier;
    `shares`: of single gradients; `in_step`: replicas compute on what the servers had at one time;
    `forgets`: the coordinator's notes may be old; `totals`: pushes say how many samples they hold.
    """
    book = Book(problem)
    return (
        book,
        LedgerChecker(book, averages=averages, shares=shares),
        AcksChecker(book),
        *((TotalsChecker(book, epochs),) if totals else ()),
        TermsChecker(),
        SamplesChecker(problem.samples, epochs, once=once),
        LeasesChecker(problem.samples, epochs, forgets=forgets),
        FetchesChecker(),
        *(() if averages or not in_step else (StalenessChecker(book),)),
        LivenessChecker(heal_at_s),
        SavedChecker(book),
        NothingLeft(),
    )


class Spy(LeastSquares):
    """Keeps every gradient that it gave out."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.given: list[np.ndarray] = []

    def gradient(self, w, batch):
        loss, gradient = super().gradient(w, batch)
        self.given.append(gradient.copy())
        return loss, gradient


class Noted(LeastSquares):
    """Which rows each worker has computed, in order."""

    def __init__(self, **more: int) -> None:
        super().__init__(**more)
        self.rows: defaultdict[int, list[Array]] = defaultdict(list)

    def gradient(self, w: Array, batch: Batch) -> tuple[float, Array]:
        self.rows[batch.slot].append(batch.rows)
        return super().gradient(w, batch)


class Watcher(Checker):
    """Keeps what was sent: (seconds, process, peer, message) of some types."""

    def __init__(self, *kinds: type) -> None:
        self.kinds = kinds
        self.sent: list[tuple[float, str, Any, Any]] = []

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, self.kinds):
            now = process.timeline.now
            self.sent.append((now, process.name, effect.peer, effect.message))

    def messages(self, name: str | None = None) -> list[Any]:
        return [message for _, source, _, message in self.sent if name in (None, source)]


class StopAtWork(Checker):
    """Somebody asks for the run's end, so long after its first push."""

    def __init__(self, simulation: Simulation, after_s: float, grace_s: float) -> None:
        self._simulation = simulation
        self._after_s = after_s
        self._request = {"grace_s": grace_s, "checkpoint": True}
        self._is_asked = False
        simulation.world.observers.append(self)

    def on_effect(self, process: Any, effect: Any) -> None:
        if isinstance(effect, Send) and isinstance(effect.message, Push) and not self._is_asked:
            self._is_asked = True
            when_s = self._simulation.world.timeline.now + self._after_s
            self._simulation.request(when_s, "stop", self._request)


class KillAtDecision(Checker):
    """When the lead has decided about a clock, and no server has heard of it yet, the first of the
    chosen workers dies, and others do.
    """

    def __init__(self, simulation: Simulation, clock: int, *others: str) -> None:
        self._world = simulation.world
        self._clock = clock
        self._others = others
        self.chosen: tuple[int, int] | None = None
        """(slot, term) of that worker."""
        self._world.observers.append(self)

    def on_effect(self, process: Any, effect: Any) -> None:
        if self.chosen is not None or not isinstance(effect, Send):
            return
        message = effect.message
        if isinstance(message, Decided) and message.clock == self._clock:
            slot, term = message.used[:2].tolist()
            self.chosen = slot, term
            self._world.timeline.after(0.0, self._kill)

    def _kill(self) -> None:
        assert self.chosen is not None
        for name in (f"worker-{self.chosen[0]}", *self._others):
            self._world.kill(name)


class KillAtCut(Checker):
    """At some stages of a cut of the model, a while later, somebody dies: often a server that the
    stage is about, else another one, the coordinator or a worker.
    """

    SHARE = 0.12
    """Of the messages of a stage."""

    def __init__(self, simulation: Simulation, rng: np.random.Generator, until_s: float) -> None:
        self._world, self._rng, self._until_s = simulation.world, rng, until_s
        self.killed: list[str] = []
        self._world.observers.append(self)

    def on_effect(self, process: Any, effect: Any) -> None:
        if not isinstance(effect, Send) or self._world.timeline.now > self._until_s:
            return
        match effect.message:
            case Decided(cut=cut) if cut:
                stage = "closing"
            case Saved() if process.name.startswith("server"):
                stage = "saving"
            case Recut(is_made=True):
                stage = "made"
            case Assign(cut=cut) if cut:
                stage = "moving"
            case NewBounds():
                stage = "announced"
            case _:
                return
        if self._rng.random() < self.SHARE:
            servers = self._world.living("server")
            others = ["coordinator", "worker-0", "worker-1", *servers]
            name = str(
                self._rng.choice(servers if servers and self._rng.random() < 0.6 else others)
            )
            after_s = float(self._rng.choice([0.0, 0.001, 0.02]))
            self.killed.append(f"{stage}: {name}")
            self._world.timeline.after(after_s, lambda: self._world.kill(name))


class SaveAtCut(Checker):
    """At every cut of the model somebody asks for a checkpoint, while the servers move."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._newest = simulation, 0
        self.clients: list[Any] = []
        simulation.world.observers.append(self)

    def on_effect(self, process: Any, effect: Any) -> None:
        match effect:
            case Send(message=Recut(cut=cut, is_made=True)) if cut > self._newest:
                self._newest = cut
                now = self._simulation.world.timeline.now
                self.clients.append(self._simulation.request(now, "checkpoint", {}))


class ReplacedAtCut(Checker):
    """While one server is slow to save for a cut of the model, another one that has saved dies, and
    its next process is at work before the slow one has saved.
    """

    SHARE = 0.7
    """Of the cuts."""
    SLOW_S = 1.6

    def __init__(self, simulation: Simulation, rng: np.random.Generator, until_s: float) -> None:
        self._world, self._rng, self._until_s = simulation.world, rng, until_s
        self._checkpoint = 0
        self._dies = ""
        self._world.observers.append(self)

    def on_effect(self, process: Any, effect: Any) -> None:
        if not isinstance(effect, Send) or self._world.timeline.now > self._until_s:
            return
        match effect.message:
            case Save(checkpoint=number) if number > self._checkpoint:
                self._checkpoint, self._dies = number, ""
                self._begin()
            case Saved(name=name) if name == self._dies:
                self._dies = ""
                self._world.timeline.after(0.1, lambda: self._world.kill(name))

    def _begin(self) -> None:
        servers = self._world.living("server")
        serving = [self._world.process(name).machine.serving for name in servers]
        are_paused = all(each is not None and each.is_paused() for each in serving)
        if are_paused and len(servers) > 1 and self._rng.random() < self.SHARE:
            slow, self._dies = (str(name) for name in self._rng.permutation(servers)[:2])
            self._world.freeze(slow)
            self._world.timeline.after(self.SLOW_S, lambda: self._world.thaw(slow))


class KillInCommit(Checker):
    """A server dies while its commit of this number is under way."""

    def __init__(self, simulation: Simulation, name: str, number: int, after_s: float) -> None:
        """after_s: the begin of the commit."""
        self._simulation = simulation
        self._name, self._number, self._after_s = name, number, after_s
        simulation.world.observers.append(self)

    def on_effect(self, process: Any, effect: Any) -> None:
        is_it = isinstance(effect, Commit) and effect.number == self._number
        if is_it and process.name == self._name:
            self._number = -1
            self._simulation.at(process.timeline.now + self._after_s, lambda: self._kill(process))

    def _kill(self, process: Any) -> None:
        if process.alive and process.machine.commits.under_way:
            self._simulation.injector.struck["kill in a commit"] += 1
            process.end(-9)


class FullAt(Checker):
    """The disk is full from the moment when something is to be written for the first time."""

    def __init__(self, simulation: Simulation, for_s: float, *kills: tuple[float, str]) -> None:
        """for_s: how long it is full. kills: (seconds after that moment, who)."""
        self.world = simulation.world
        self.at_s = math.inf
        """That moment, once it has come."""
        self._for_s = for_s
        self._kills = kills
        self.world.observers.append(self)

    def is_it(self, written: Json) -> bool:
        """Whether it is this piece of the coordinator's memory."""
        raise NotImplementedError

    @property
    def until_s(self) -> float:
        return self.at_s + self._for_s

    def is_full(self) -> bool:
        is_then = self.at_s <= self.world.timeline.now < self.until_s
        return is_then and self.world.disk.full > 0  # All faults may have been healed meanwhile.

    def on_effect(self, process: Any, effect: Any) -> None:
        is_it = isinstance(effect, Remember) and self.is_it({effect.key: effect.value})
        if not is_it or self.at_s < math.inf:
            return
        disk, timeline = self.world.disk, self.world.timeline
        self.at_s = timeline.now
        disk.full += 1
        timeline.at(self.until_s, lambda: setattr(disk, "full", max(0, disk.full - 1)))
        for after_s, name in self._kills:
            timeline.after(after_s, lambda name=name: self.world.kill(name))


class FullAtRelease(FullAt):
    """When all workers may begin; until that is on record, nobody may."""

    def is_it(self, written: Json) -> bool:
        return Memory(written).has_released

    def on_effect(self, process: Any, effect: Any) -> None:
        is_push = isinstance(effect, Send) and isinstance(effect.message, Push)
        if is_push and self.is_full():
            raise self.broken(f"{process} pushes, and it is not on record that all have come")
        super().on_effect(process, effect)


class FullAtDrain(FullAt):
    """When workers are told to drain for the end, of which the next coordinator knows nothing."""

    def is_it(self, written: Json) -> bool:
        return "end" in written


class FullAtEnd(FullAt):
    """When all is done but the end of the processes; until that is on record, what servers have
    kept stays.
    """

    def is_it(self, written: Json) -> bool:
        return "end" in written and bool(written["end"][3])

    def on_message(self, process: Any, peer: Any, message: Any) -> None:
        if isinstance(message, Shutdown) and not message.keep_state and self.is_full():
            raise self.broken(f"{process} may remove what is kept, and the end is not on record")


def rows_in_order(job: config.JobFile, samples: int, epochs: int) -> list[Any]:
    """The rows of every batch in the order in which a single worker gets them."""
    most = job.data.portion_batches * job.workers.batch_size
    portions = -(-samples // most)
    batches = []
    for data_epoch in range(epochs):
        for index in range(portions):
            start, stop = slice_bounds(samples, portions, index)
            for number in range(-(-(stop - start) // job.workers.batch_size)):
                batch = (number, job.workers.batch_size)
                batches.append(batch_rows(samples, job.job.seed, data_epoch, (start, stop), batch))
    return batches
