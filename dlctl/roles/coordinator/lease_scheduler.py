"""The data side of the coordinator: leases portions, counts what is done, detects the end."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from dlctl import batches, registry, schedule
from dlctl import messages as m
from dlctl.algorithms.base import Lead, Table
from dlctl.clients import epoch_samples
from dlctl.config import JobFile
from dlctl.errors import DlctlError, RemoteProtocolError
from dlctl.machine import Peer
from dlctl.messages import Json
from dlctl.roles.coordinator.bad_samples import BadSamples
from dlctl.roles.coordinator.dataset import Dataset
from dlctl.roles.coordinator.driven import DrivenMethod
from dlctl.roles.coordinator.membership import Daemon
from dlctl.roles.coordinator.portions import ClientPool, Lateness, PortionPool, Range
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.streams import UNKNOWN, StreamPool
from dlctl.roles.protocol.limits import METRIC_NAME_CHARS_MAX
from dlctl.roles.protocol.meters import follow
from dlctl.runs.memory import ANSWER, PORTION, Entry, Evaluation, Fields, Memory, Work
from dlctl.util.text import plural

LOSS_WEIGHT = 0.1
"""Of the newest portion in the running mean of the loss."""


class LeaseScheduler:
    def __init__(self, run: RunState) -> None:
        self.run = run
        self.context = run.context
        self.members = run.members
        job, options = run.job, run.algorithm.Options(**run.job.algorithm.options)
        self.batch_size = 0
        """The batch size that was found; 0: the job file sets it, or none was found yet."""
        self.side: Lead = run.algorithm.lead(options)
        self.tables: Sequence[Table] = run.algorithm.shape.tables_of(options)
        self.steps = self.samples = 0
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        """What else the task's loss returns, as running means like that of the loss."""
        self.driving: DrivenMethod | None = None
        self._pool: PortionPool | StreamPool | None = None
        self._end_reported = False
        """Whether the event that the stream has ended and is read again was sent."""
        self.dataset = Dataset()
        """The dataset of `pool`."""
        self._built = Dataset()
        """The same before there is a pool; until a worker has reported, that of the checkpoint."""
        self._counts_steps = any(host.batch_size for host in job.places)
        """The steps of a portion are known only when it is done."""
        self._lists_unknown = False
        """A predecessor of an earlier version has recorded the dataset without what identifies its
        parts: the first worker says it."""
        self._order: str | None = None
        """Digest of the task's sample order, from the first worker that reported."""
        self._restore: Json = {}
        self._journal: Json = {}
        """Of the method that the coordinator drives, from the checkpoint or the predecessor."""
        self.answered: dict[int, m.Lease] = {}
        """Slot -> its newest lease, in case its request is resent."""
        self._answers_changed: set[int] = set()
        """Slots whose newest lease has changed since it was persisted."""
        self._pending: dict[int, m.LeaseRequest] = {}
        self.evaluated_at = 0.0
        """`_evaluation_clock` at the start of the newest evaluation."""
        self.scale = schedule.first_scale(job) if schedule.scales(job.schedule) else None
        """Of the rate, if it scales with the number of workers."""
        self._lateness = Lateness()
        """Of the portions of a driven method's batch."""
        self._cuts_epochs = type(self.side).cut_epoch is not Lead.cut_epoch
        self._bad_samples = BadSamples(job.data.bad_samples_max)

    @property
    def released_at(self) -> float | None:
        """When the workers were released to train."""
        return self.run.released_at

    @property
    def is_driven(self) -> bool:
        """Whether the coordinator drives the method."""
        return type(self.side).drive is not Lead.drive

    # ------------------------------------------------------------ the dataset

    @property
    def pool(self) -> PortionPool | StreamPool:
        """The portions of all epochs; for a method that the coordinator drives, a batch is an
        epoch.
        """
        assert self._pool is not None
        return self._pool

    def restore(self, data: Json) -> None:
        """Restore the data and the steps from a checkpoint's manifest."""
        self._restore = data
        self._built = Dataset.saved(data)
        self._resume(data)

    def _resume(self, data: Json) -> None:
        """data: of a checkpoint, or of a predecessor."""
        self.steps, self.samples = data.get("steps", 0), data.get("samples", 0)
        self.loss, self.metrics = data.get("loss"), dict(data.get("metrics", {}))
        self.side.steps_done = self.steps
        self.find_batch_size(data.get("batch_size", 0))
        if "lead" in data:
            self.restore_lead(data["lead"])
        if self.scale is not None and data.get("scale"):
            self.scale = schedule.Scale(*data["scale"])

    def lead(self) -> list[Any]:
        """[clock, state] of the method's lead, and the journal of a lead that drives the method;
        for `restore_lead`.
        """
        if self.driving is not None:
            return [self.side.clock, self.driving.snapshot, self.driving.to_json()]
        return [self.side.clock, self.side.state(), self._journal]

    def restore_lead(self, lead: Sequence[Any]) -> None:
        self.side.clock, state, self._journal = lead
        self.side.resume(state)

    def changed_portions(self) -> Iterator[Entry]:
        for epoch, portion, standing in self._pool.take_changes() if self._pool else ():
            yield Entry(f"{PORTION}{epoch}/{portion}", standing)

    def changes(self) -> Iterator[Entry | Fields]:
        yield from self.changed_portions()
        next_ = self._pool.next if self._pool is not None else (0, 0)
        done = {"steps": self.steps, "samples": self.samples, "loss": self.loss}
        yield Fields(Work, done | {"dataset_samples": self.dataset.samples, "next": next_})
        yield Fields(Evaluation, {"since": self.evaluated_at})
        yield Entry("stream", self.dataset.shards)
        yield Entry("clients", self.dataset.clients)
        yield Entry("names", None if self._lists_unknown else self.dataset.names)
        yield Entry("files", self.dataset.files)
        # A task may change until its workers are released.
        yield Entry("order", None if self.released_at is None else self._order)
        yield Entry("metrics", dict(self.metrics))
        yield Entry("batch_size", self.batch_size)
        yield Entry("lead", self.lead())
        yield Entry("scale", self.scale)
        changed, self._answers_changed = self._answers_changed, set()
        for slot in changed:
            of = self.answered.get(slot)
            # In the order of the message's fields. Samples are 0: they would change the row at
            # every answer.
            row = of and (of.request, of.portion, of.data_epoch, of.start, of.stop, 0, of.shard)
            yield Entry(f"{ANSWER}{slot}", row)

    def recall(self, memory: Memory, now: float) -> None:
        work, stored = memory.work, memory.stored
        done = {"steps": work.steps, "samples": work.samples, "loss": work.loss}
        self._resume({**stored, **done})
        shards, clients = memory.value("stream", 0), tuple(memory.value("clients", ()))
        names, files = memory.value("names"), memory.value("files", "")
        dataset = Dataset(work.dataset_samples, shards, clients, names or "", files)
        self._lists_unknown = names is None and any(dataset)
        self._order = memory.value("order")
        if any(dataset):
            self._restore = {}
            self.open_dataset(dataset)
            rows = ((key.split("/"), value) for key, value in memory.under(PORTION))
            standing = {(int(epoch), int(portion)): value for (epoch, portion), value in rows}
            self.pool.go_on((work.next[0], work.next[1]), standing)
            self._end_reported = dataset.shards > 0 and work.next[0] > 0
            self.evaluated_at = (memory.piece(Evaluation) or Evaluation()).since
        for slot, value in memory.under(ANSWER):
            self.answered[int(slot)] = m.Lease(*value)

    def find_batch_size(self, found: int) -> bool:
        """A worker, or an earlier execution, has found it. Returns whether it was unknown."""
        before, self.run.job = self.run.job, batches.resolved(self.run.job, found)
        is_news = self.run.job is not before
        self.batch_size = found if is_news else self.batch_size
        return is_news

    def take_dataset(self, worker: str, dataset: Dataset, order: str = "") -> None:
        """A worker has built the dataset; order: digest of its task's sample order. Raises
        DlctlError if the dataset or the order differs from that of other workers or of before.
        """
        is_first = self._pool is None and self._order is None
        known = self.dataset if self._pool else self._built
        self._built = known.met(worker, dataset, resumes=is_first or self._lists_unknown)
        if self._lists_unknown:
            self._built.check_places()
            self.dataset, self._lists_unknown = self._built, False
        if is_first and any(known):
            self._report_changes(worker, known)
        if self._pool is None and not batches.is_open(self.run.job):
            self.open_dataset(self._built)
            self.rescale(self.run.job.workers.count)
        if self._order is None:
            self._order = order
        elif order != self._order:
            raise DlctlError(
                f"the samples of {worker} come in another order than those of the other workers",
                hint="sampler(dataset, epoch) and sample_weights(dataset) must return the same in "
                "every process; what torch, numpy and random draw there does",
            )

    def _report_changes(self, worker: str, saved: Dataset) -> None:
        """What a resumed run finds in its dataset besides what its checkpoint had."""
        if new := self._built.shards - saved.shards:
            text = f"{plural(new, 'shard')} of the stream are new since the checkpoint"
            self.context.event("data", worker, text)
        if "" != saved.files != self._built.files != "":
            self._restore = {**self._restore, "portions": []}
            text = "the dataset lists other files than at the checkpoint, or in another order"
            self.context.event("data", worker, f"{text}: its data epoch begins again")

    def open_dataset(self, dataset: Dataset) -> None:
        """Raises DlctlError if this job cannot be trained with it."""
        samples, shards, clients = dataset[:3]
        job = self.run.job
        if samples < 1 and not shards:
            raise DlctlError("the dataset has no samples", hint="check the task's dataset()")
        if shards:
            self._check_stream()
        if clients and self.is_driven:
            raise DlctlError(
                f'"{job.algorithm.name}" has one dataset, and data.clients cuts it into many',
                hint="remove data.clients, or take another [algorithm]",
            )
        try:
            schedule.factor(job, samples)
        except ValueError as error:
            raise DlctlError(str(error), hint="correct [schedule]: warmup, or over") from None
        self._pool = self._stream(dataset) if shards else self._portions(samples, clients)
        self.dataset = dataset
        if isinstance(self._pool, PortionPool) and not clients:
            # The run may be too short for its method to have an effect.
            steps = self._pool.limit * -(-self._pool.portion_samples // batches.smallest(job))
            method = registry.load("algorithms", job.algorithm.name)
            for path, what, instead in method.check_steps(job, steps):
                raise DlctlError(f"{'.'.join(path)}: {what}", hint=instead)
        self.evaluated_at = self._evaluation_clock()

    def _check_stream(self) -> None:
        """Raises DlctlError if the job needs a dataset of known length."""
        epochs = self.run.job.job.stop.epochs
        if self.is_driven or self._cuts_epochs:
            raise DlctlError(
                f'"{self.run.job.algorithm.name}" goes over the whole dataset again and again, and '
                "this one is a stream, of unknown length",
                hint="give a dataset with __len__ and __getitem__, or take another [algorithm]",
            )
        if epochs:
            raise DlctlError(
                "an iterable dataset is a stream, whatever its __len__ says, so job.stop cannot "
                f"count epochs (epochs = {epochs:g}, also where the job file says nothing)",
                hint="write stop = { samples = 1_000_000 } under [job], or steps, seconds, target; "
                "or return a map-style dataset, with __len__ and __getitem__",
            )
        if batches.smallest(self.run.job) != batches.largest(self.run.job):
            raise DlctlError(
                "the dataset is a stream, whose steps are counted by batches of one size",
                hint="remove batch_size from [[hosts]]",
            )

    def _portions(self, samples: int, clients: tuple[int, ...]) -> PortionPool:
        pool = PortionPool(
            samples, self.run.job.data.portion_batches * batches.largest(self.run.job)
        )
        if clients:
            drawn = self.side.cohort(len(clients))
            owners = self.run.job.workers.count if self.run.job.data.partition == "workers" else 0
            pool = ClientPool(
                epoch_samples(clients, drawn), drawn.clients, sizes=clients, passes=drawn.passes,
                seed=self.run.job.job.seed, owners=owners,
            )  # fmt: skip
            self._counts_steps = True
        pool.limit = _portions(self.run.job, pool)
        if self._restore.get("portion_samples") == pool.portion_samples:
            pool.restore(self._restore["complete_epochs"], self._restore["portions"])
        elif self._restore:
            # The portions have another size now: only whole epochs can be matched.
            pool.restore(self._restore["complete_epochs"], [])
        return pool

    def _stream(self, dataset: Dataset) -> StreamPool:
        stop, step_samples = self.run.job.job.stop, batches.largest(self.run.job)
        pool = StreamPool(
            dataset.shards, self.run.job.data.portion_batches * step_samples, step_samples,
            stop.samples or math.inf, stop.steps or math.inf, order=dataset.order,
        )  # fmt: skip
        if self._restore:
            pool.restore(self._restore["stream"], self._restore["portion_samples"])
            self._end_reported = pool.passes() > 1
        return pool

    def rescale(self, workers: int) -> None:
        """The number of workers changes. The scaled rate applies from the first sample that has not
        been leased yet: all servers receive it before that sample.
        """
        after = schedule.multiple(self.run.job, workers)
        if self.scale is not None and self.scale.after != after:
            warmup = schedule.warmup_samples(self.run.job, self.dataset.samples)
            since = max(self.pool.samples_leased(), self.samples)
            self.scale = self.scale.to(after, since, warmup)

    def to_json(self) -> Json:
        """For a checkpoint's manifest."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "loss": self.loss,
            **({"metrics": dict(self.metrics)} if self.metrics else {}),
            "portion_samples": self.pool.portion_samples,
            **({"batch_size": self.batch_size} if self.batch_size else {}),
            **self.pool.to_json(),
            **self.dataset.to_json(),
            "lead": self.lead(),
            **({"scale": self.scale} if self.scale is not None else {}),
        }

    # ------------------------------------------------------------ leases

    def release(self, now: float) -> None:
        """All workers are ready: start to train."""
        self.run.released_at = now
        self.begin_driving()
        self.grant(now)

    def begin_driving(self) -> None:
        """Start or resume a method that the coordinator drives."""
        if not isinstance(self._pool, PortionPool) or not self.is_driven:
            return
        self._pool.limit = 0
        servers = self.run.job.servers.count
        self.driving = DrivenMethod(
            self.context, self.side, self._pool, self.tables, servers, self._journal
        )

    def drive(self, now: float) -> None:
        """Let the driven method make its next request, if one is waiting."""
        if self.driving is not None:
            self.driving.advance(now)
            self.grant(now)

    def on_vector_result(self, peer: Peer, result: m.VectorResult, now: float) -> None:
        if self.driving is not None:
            self.driving.on_result(result, now)

    def on_request(self, request: m.LeaseRequest, now: float) -> None:
        answered = self.answered.get(request.slot)
        if answered is not None and request.request <= answered.request:
            # Resent, or overtaken by a newer request: then the worker does not need the answer.
            if request.request == answered.request:
                self.context.send(f"worker-{request.slot}", answered)
            return
        if isinstance(self._pool, StreamPool):
            for at in range(0, len(request.ends) - 2, 3):
                self._pool.on_end(request.slot, *request.ends[at : at + 3])
        self._pending[request.slot] = request
        self.grant(now)

    def grant(self, now: float) -> None:
        """Answer the workers that wait for data and may train now.

        Between two batches of a driven method, and while the last portions of a batch are leased,
        they are left waiting: so the next batch, or a dead worker's portions, start at once.
        """
        if self.released_at is None:
            return
        slots = self.members.live_slots()
        first = min(slots, default=0)
        self._end_epochs(frozenset(slots))
        if self.run.shutdown is not None:
            for slot in list(self._pending):
                self._answer(slot, None)
            return
        for slot, request in list(self._pending.items()):
            if self.side.may_lease(slot, first):
                if self._cuts_epochs:
                    # It has had its share; an empty lease makes it push what it has accumulated.
                    self._answer(slot, None)
                continue
            too_much = request.ahead and not self.pool.may_hoard(slot, len(slots))
            taken = None if too_much else self.pool.take(slot)
            if self.is_driven and isinstance(self._pool, PortionPool):
                # Of a batch: the portion it took, or a backup copy of a late one.
                if taken is not None:
                    self._lateness.leased((taken.data_epoch, taken.portion), now)
                elif late := self._lateness.first(self._pool.without_copy(slot), now):
                    taken = self._pool.copy(slot, late)
            if taken is not None or not self.is_driven:
                self._answer(slot, taken)
                self._update_epoch()
        if isinstance(self._pool, StreamPool) and not self._end_reported:
            self._report_end(self._pool)

    def copy_due(self) -> float | None:
        """When a worker that waits for data gets a backup copy, if nothing else happens before."""
        if not self.is_driven or not isinstance(self._pool, PortionPool):
            return None
        first = min(self.members.live_slots(), default=0)
        due = [
            self._lateness.deadline(self._pool.without_copy(slot))
            for slot in self._pending
            if not self.side.may_lease(slot, first)
        ]
        return min((at for at in due if at is not None), default=None)

    def _report_end(self, pool: StreamPool) -> None:
        """A stream has ended before the run. That may be intended; one event reports it."""
        samples = pool.samples_in_all()
        if pool.passes() > 1 and samples is not None:
            text = f"the stream has ended after {samples:,} samples, and is read again"
            self.context.event("stream", "", f"{text} until job.stop is reached")
            self._end_reported = True

    def _end_epochs(self, slots: frozenset[int]) -> None:
        """Drop the rest of the data epochs that the method has ended, with returned portions."""
        if not self._cuts_epochs or not isinstance(self._pool, PortionPool):
            return
        side, pool = self.side, self._pool
        side.members = slots
        self._update_epoch()
        while side.epoch.portions and side.cut_epoch():
            side.data_epoch += 1
            self._update_epoch()
        pool.drop(before=side.data_epoch)

    def _update_epoch(self) -> None:
        if self._cuts_epochs and isinstance(self._pool, PortionPool):
            self.side.epoch = self._pool.standing(self.side.data_epoch)

    def on_report(self, worker: Daemon, now: float) -> None:
        """Portions that are on record as leased to a worker that has none are leased again. It has
        none if it reports that, and had received no portion in answer to its newest request.

        A coordinator that could not write to the database may have been notified that the portion
        is done, or may have answered the same request with another portion.
        """
        slot, metrics = worker.index, worker.metrics
        newest = self._pending.get(slot) or self.answered.get(slot)
        is_sent = isinstance(newest, m.Lease) and newest.start < newest.stop
        if newest is None or is_sent or metrics.get("request") != newest.request:
            return
        if metrics.get("portions") == 0 and self._pool is not None and self._pool.doubt(slot):
            self.grant(now)

    def _answer(self, slot: int, taken: Range | None) -> None:
        request, taken = self._pending.pop(slot), taken or Range(0, 0, 0, 0)
        lease = m.Lease(
            request.request, taken.portion, taken.data_epoch, taken.start, taken.stop,
            self.samples, taken.shard,
        )  # fmt: skip
        self.answered[slot] = lease
        self._answers_changed.add(slot)
        self.context.send(f"worker-{slot}", lease)

    def gone(self, slot: int, now: float) -> int:
        """The worker of a slot has died. Returns the number of portions to lease again."""
        self._pending.pop(slot, None)
        self.answered.pop(slot, None)
        self._answers_changed.add(slot)
        if self._pool is None:
            return 0
        back = self.pool.release(slot)
        self.grant(now)
        return len(back)

    def held_back(self, now: float) -> str:
        """Why workers wait although there is data, or will be; "" if no worker waits."""
        if self.driving is not None:
            return self.driving.waits_for(now)
        first = min(self.members.live_slots(), default=0)
        reasons = (self.side.may_lease(slot, first) for slot in self._pending)
        return next((reason for reason in reasons if reason), "")

    # ------------------------------------------------------------ what is done

    def on_portion_done(self, done: m.PortionDone, now: float) -> None:
        """Count steps and samples once per portion. Raises RemoteProtocolError if the worker
        reports more of them than the portion has, or that the stream ends elsewhere.
        """
        key = done.data_epoch, done.portion
        if self._pool is None or not self.pool.may_finish(done.slot, *key):
            return
        self._check(done)
        self._lateness.done(key, now, copied=self.pool.is_copied(key))
        self.pool.finish(*key, done.end)
        self.steps += done.steps
        self.samples += done.samples
        self.side.steps_done = self.steps
        self.side.portion_done(done.slot, done.steps, done.samples, done.data_epoch)
        if done.samples:
            loss = done.loss_sum / done.samples
            mean = loss if self.loss is None else self.loss + LOSS_WEIGHT * (loss - self.loss)
            self.loss = mean if math.isfinite(mean) else self.loss  # It is persisted.
            follow(self.metrics, _means(done), LOSS_WEIGHT)
        if self.driving is not None:
            self.driving.on_portion(done)
        self.grant(now)

    def _check(self, done: m.PortionDone) -> None:
        start, stop = self.pool.bounds(done.portion)
        steps = -(-(stop - start) // batches.smallest(self.run.job))
        if done.steps > steps or done.samples > stop - start:
            said = f"{done.steps} steps and {done.samples} samples"
            raise RemoteProtocolError(f"{said} of a portion of {steps} and {stop - start}")
        if done.end != UNKNOWN and isinstance(self._pool, StreamPool):
            self._pool.check_end(done.data_epoch, done.portion, done.end)

    def sample_failed(self, said: m.SampleFailed) -> str:
        """A worker has skipped a sample. Returns the worker's error if that is one too many.

        Raises RemoteProtocolError if the sample cannot be in a portion that the worker has.
        """
        epoch, most = said.data_epoch, self._bad_samples.most
        if self._pool is None or not self._pool.may_finish(said.slot, epoch, said.portion):
            raise RemoteProtocolError(f"it does not have portion {said.portion} of epoch {epoch}")
        rows = self._rows()
        if not said.sample < rows:
            raise RemoteProtocolError(f"the dataset has {rows} samples")
        start, stop = self._pool.bounds(said.portion)
        count = self._bad_samples.add(said, stop - start)
        if not count:
            return ""
        of = f"{count} of at most {most} in epoch {epoch}"
        text = f"sample {said.sample} could not be loaded ({of}): {said.error}"
        self.context.event("sample", f"worker-{said.slot}", text, detail=said.detail)
        if count <= most:
            return ""
        self._bad_samples.forget(said.slot)
        which = f"{count} samples of epoch {epoch} could not be loaded"
        return f"{said.error}; {which}, and data.bad_samples_max is {most}"

    def _rows(self) -> float:
        """Samples of the dataset by number; infinite if they are unknown: a task with an order of
        its own may choose some of them for each epoch.
        """
        if self.dataset.clients or self.dataset.shards:
            return sum(self.dataset.clients)
        return self.dataset.samples if self._order == "" else math.inf

    def enough(self, now: float) -> str:
        """Why the run has finished; "" if it has not."""
        stop = self.run.job.job.stop
        if self._pool is None or self.released_at is None:
            return ""
        if self.driving is not None and self.driving.over:
            return self.driving.over
        if not self.is_driven and self._pool.is_finished():
            if isinstance(self._pool, StreamPool):
                return f"{self._pool.samples_done:,} samples are done"
            return f"{self._pool.epochs_done():.3g} epochs are done"
        if self._counts_steps and stop.steps and self.steps >= stop.steps:
            return f"{self.steps:,} steps are done"
        if stop.seconds is not None and now - self.released_at >= stop.seconds:
            return f"{stop.seconds:g} seconds are over"
        if self.dataset.clients and stop.samples and self.samples >= stop.samples:
            return f"{self.samples:,} samples are done"
        return ""

    def failed(self) -> str:
        """Why the method that the coordinator drives, or the stream, cannot continue; "" if it
        can.
        """
        if isinstance(self._pool, StreamPool):
            return self._pool.failed
        return self.driving.failed if self.driving is not None else ""

    def deadline(self) -> float | None:
        seconds = self.run.job.job.stop.seconds
        return None if seconds is None or self.released_at is None else self.released_at + seconds

    # ------------------------------------------------------------ evaluations

    def evaluation_due(self) -> bool:
        """Whether enough steps or epochs have passed since the start of the last evaluation.
        Returns True once per evaluation.
        """
        every = self.run.job.evaluation.every_steps or self.run.job.evaluation.every_epochs
        if self._pool is None or self.is_driven or not every:
            return False
        if self._evaluation_clock() < self.evaluated_at + every:
            return False
        self.evaluated_at = self._evaluation_clock()
        return True

    def _evaluation_clock(self) -> float:
        """The clock of evaluations: all workers' steps, or epochs."""
        return self.steps if self.run.job.evaluation.every_steps else self.epochs_done()

    def epochs_done(self) -> float:
        return self._pool.epochs_done() if self._pool is not None else 0.0

    def progress(self) -> float | None:
        """Progress of the run, 0..1; None if unknown."""
        if self._pool is None or self.is_driven:
            return None
        steps = self.run.job.job.stop.steps if self._counts_steps else None
        by_data = self._pool.progress()
        return by_data if not steps else min(1.0, max(by_data or 0.0, self.steps / steps))


def _means(done: m.PortionDone) -> dict[str, float]:
    """The means of a portion's metrics besides the loss; implausible reports are left out."""
    found = {}
    for name, said in done.metric_sums.items():
        match said:
            case [float(total), int(samples)] if 0 < samples <= done.samples:
                found[name[:METRIC_NAME_CHARS_MAX]] = total / samples
    return found


def _portions(job: JobFile, pool: PortionPool) -> float:
    """Portions until the first of the job's limits; steps and samples round up to portions. If
    hosts have their own batch sizes, the limit of steps may be reached earlier."""
    stop = job.job.stop
    if isinstance(pool, ClientPool):  # Steps and samples are counted when they are done.
        return math.ceil(stop.epochs * pool.per_epoch) if stop.epochs else math.inf
    steps_before = partial(pool.steps_before, batch_size=batches.largest(job))
    limits = [
        math.ceil(stop.epochs * pool.per_epoch) if stop.epochs else math.inf,
        _until(stop.steps, pool.per_epoch, steps_before),
        _until(stop.samples, pool.per_epoch, pool.samples_before),
    ]
    return min(limits)


def _until(wanted: int | None, per_epoch: int, before: Callable[[int], int]) -> float:
    """Portions until `before`, summed over epochs, reaches `wanted`."""
    if not wanted:
        return math.inf
    epochs, rest = divmod(wanted, before(per_epoch))
    return epochs * per_epoch + bisect_left(range(per_epoch), rest, hi=per_epoch, key=before)
