"""A replica that is cut over several processes, `[replica]`: what all ranks do, and rank 0.

Rank 0 is the worker. Its method reads and writes vectors in the replica's host memory
(`spread_vectors.py`). It evaluates alone, with a whole model whose values are in that memory. The
other ranks get calls from rank 0 (`rank_processes.py`) and perform them on their slices.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from daemons.worker import nested_tensors
from daemons.worker.ranks.model_slices import cut_by_fsdp, cut_by_tensors, pieces, without_values
from daemons.worker.ranks.model_stages import cut
from daemons.worker.ranks.pipeline import StagePart, shown, stage_pieces
from daemons.worker.ranks.rank_group import RankMessage, on_loopback
from daemons.worker.ranks.rank_memory import PARAMETERS, STATES, RankMemory
from daemons.worker.ranks.rank_part import Kept, PartStepper, RankPart, Weighted
from daemons.worker.ranks.rank_processes import Ranks, RanksEnded
from daemons.worker.ranks.spread_vectors import Answer, Share, SpreadVectors
from daemons.worker.replica import TorchReplica
from daemons.worker.stepper import SCALER, Stepped, together, weight_of
from daemons.worker.task.failures import explained
from daemons.worker.task.user_task import Task, TaskError
from dlctl import registry
from dlctl.algorithms.needs import Pull
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.model import parameter_groups
from dlctl.model.flat import TRAINED, Layout
from dlctl.model.vector import zeros_like
from dlctl.util import pages
from dlctl.wire.messages import Array, Json

log = logging.getLogger("dlctl")

M_MMAP_THRESHOLD = -3
GIVES_BACK_BYTES = 1 << 18


class WholeReplica(TorchReplica):
    """The whole model, on the CPU, until it is cut. That of rank 0 is in the memory of all ranks
    and evaluates: on the CPU it reads the values module by module, otherwise it moves to the device
    for an evaluation.
    """

    evaluates_on = torch.device("cpu")
    memory: RankMemory
    vectors: SpreadVectors
    """The vectors of all ranks; set when the model is cut."""

    def __init__(self, memory: int, task: Task, **how: Any) -> None:
        """memory: a file that all ranks have open; -1: this is a later rank."""
        self._file = memory
        super().__init__(task, **how)

    def _room(self) -> tuple[Tensor, bool]:
        if self._file < 0:
            return torch.empty(self.layout.size(), dtype=torch.float32, device="cpu"), False
        self.memory = RankMemory(self._file, self.layout.size())
        return self.memory.vector(PARAMETERS), True

    @contextmanager
    def _at(self, parameters: Array, averaged: Array) -> Iterator[None]:
        values = self.vectors.holding(parameters)
        place = self.memory.place(values)
        assert place is not None
        with super()._at(values, averaged), ExitStack() as after:
            if self.evaluates_on.type == "cpu":
                let_go = partial(self._let_go, place[0])
                after.callback(register_module_forward_hook(let_go).remove)
            else:
                self.model.to(self.evaluates_on)
                after.callback(self.model.to, "cpu")
            yield

    def _let_go(self, number: int, module: nn.Module, *_: Any) -> None:
        """Unmap the values of a module that has been computed; number: of the vector with them."""
        mine = set(module.parameters(recurse=False))
        places = zip(self._bound, self.layout.slices(TRAINED), strict=True)
        self.memory.free(number, ((lo, hi) for (p, _), (_, lo, hi) in places if p in mine))


# ---------------------------------------------------------------- what every rank does


def make_stepper(
    job: JobFile, whole: TorchReplica, memory: RankMemory, device: torch.device, rank: int
) -> PartStepper:
    """Cut a whole model and keep the rank's part. All ranks call this, after they have joined their
    group. Raises TaskError, DlctlError.
    """
    task, layout, chosen = whole.task, whole.layout, job.replica
    vector = memory.vector(PARAMETERS)
    model = without_values(whole.model, device)
    about: dict[str, Any] = {"rank": rank, "precision": job.gradient.precision}
    with on_loopback():
        if chosen.pipeline > 1:
            stages = cut(task, model, chosen.pipeline)
            if rank == 0:
                log.info("stages: %s", shown(stages))
            mine, shared = stage_pieces(model, layout, vector, stages, device, rank)
            part: RankPart = StagePart(
                task, model, layout, mine, memory, device, tells=True,
                cut=stages, shared=shared, kind=chosen.schedule, **about,
            )  # fmt: skip
        else:
            by_fsdp = chosen.fsdp > 1
            mesh = init_device_mesh(device.type, (chosen.ranks,))
            (cut_by_fsdp if by_fsdp else cut_by_tensors)(task, model, mesh)
            if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
                raise TaskError(
                    "task.parallelize has cut no parameter of the model",
                    where=task.place("parallelize"),
                    hint="use fully_shard or parallelize_module on its mesh argument",
                )
            mine = pieces(task, model, layout, vector, device, rank)
            part = RankPart(
                task, model, layout, mine, memory, device, tells=by_fsdp or rank == 0, **about
            )
    gc.collect()  # Free the whole model, which is no longer used.
    return PartStepper(part, job, parameter_groups.of_each(job.parameters, layout))


def give_memory_back() -> None:
    """Have glibc return large tensors to the system when they are freed. FSDP allocates and frees
    gathered parameters all the time; glibc adapts by keeping that memory, in fragments that the
    next tensors do not fit into, and a rank would take twice the memory that it needs.
    """
    with suppress(AttributeError):  # The C library is not glibc.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, GIVES_BACK_BYTES)


def digest(layout: Layout) -> str:
    return hashlib.sha256(layout.to_bytes()).hexdigest()


def _share(job: JobFile, memory: RankMemory, order: Mapping[str, Any], rank: int) -> Share:
    """A rank's part of the method's vectors, with its own compressor."""
    kind = registry.load("compressors", job.compression.name)
    compressor = kind(kind.Options(**job.compression.options))
    compressor.reseed(job.job.seed, order["slot"], order["term"], rank)
    return Share(memory, rank, job.replica.ranks, compressor)


class PartCalls:
    """Performs the calls of rank 0 in a later rank."""

    def __init__(
        self, job: JobFile, whole: TorchReplica, order: Mapping[str, Any], rank: int
    ) -> None:
        """order: the header of the first message of rank 0."""
        self._job, self._rank = job, rank
        self._whole: TorchReplica | None = whole
        self._order = order
        self._stepper: Any = None
        self._share: Any = None

    def make(self, call: RankMessage) -> tuple[dict[str, Any], Sequence[Array]]:
        """Perform a call; returns the answer to rank 0. Raises TaskError, DlctlError."""
        match call.kind:
            case "cut":
                self._cut(call.header["layout"], torch.device(call.header["device"]))
            case "step":
                return self._step(call), ()
            case "work":
                return self._share.work(**call.header)  # type: ignore[no-any-return]
            case "buffers":
                self._stepper.part.load_averaged(call.arrays[0])
            case "state":
                return _answer_of(self._stepper.state())
            case "restore":
                self._stepper.restore(_kept(call))
        return {}, ()

    def _cut(self, layout: str, device: torch.device) -> None:
        assert self._whole is not None
        whole, self._whole = self._whole, None  # Its memory is no longer needed.
        if digest(whole.layout) != layout:
            raise DlctlError(
                "the model differs from that of rank 0",
                hint="the task's code must build the same model in every process",
            )
        memory = RankMemory(self._order["memory"], whole.layout.size())
        self._stepper = make_stepper(self._job, whole, memory, device, self._rank)
        self._share = _share(self._job, memory, self._order, self._rank)

    def _step(self, call: RankMessage) -> dict[str, Any]:
        arguments = dict(call.header)
        batches = nested_tensors.unpacked(arguments.pop("batches"), call.arrays)
        with explained(self._job, int(self._job.workers.batch_size)):
            _, measured = self._stepper.step(batches, **arguments)
            self._stepper.part.averaged()
        return {
            "measured": [[weight_of(n, each), each.metrics] for n, each in measured if each.metrics]
        }


def _answer_of(kept: Kept) -> Answer:
    numbers = {name: value if isinstance(value, int) else 0 for name, value in kept.items()}
    return {"kept": numbers}, [value for value in kept.values() if not isinstance(value, int)]


def _kept(message: RankMessage) -> Kept:
    arrays = iter(message.arrays)
    return {name: number or next(arrays) for name, number in message.header["kept"].items()}


# ---------------------------------------------------------------- rank 0


class CutReplica:
    """The worker's view of its cut replica; it replaces `TorchReplica`."""

    def __init__(self, whole: WholeReplica, stepper: CutStepper) -> None:
        self.whole, self._stepper = whole, stepper
        self.task, self.layout, self.parameters = whole.task, whole.layout, whole.vectors.parameters
        self.device, self.lacks_weights = whole.evaluates_on, False
        self.rows = None
        self.values_averaged: Array = whole.averaged()
        self.evaluate, self.finish = whole.evaluate, whole.finish
        self.reseed, self.frozen = whole.reseed, whole.frozen

    def averaged(self) -> Array:
        """The values after the last step: float64[n]."""
        return self.values_averaged

    def load_averaged(self, values: Array) -> None:
        self._stepper.load_averaged(values)
        self.values_averaged = np.array(values)

    def load_frozen(self, values: Mapping[int, Tensor]) -> None:
        if values:
            raise DlctlError(
                "this worker has built other frozen parameters than the run has, and cannot load "
                "them into each process of its replica",
                hint="have model() build the same ones everywhere, or set job.weights",
            )


class CutStepper:
    """The stepper of a cut replica: rank 0 makes every step together with the others."""

    def __init__(
        self, job: JobFile, whole: WholeReplica, ranks: Ranks, devices: Sequence[torch.device]
    ) -> None:
        """ranks: started. devices: of each rank. Raises TaskError, DlctlError, RanksEnded."""
        ranks.meet(devices[0].type)
        whole.evaluates_on = devices[0]
        header = {"layout": digest(whole.layout)}
        self._job, self._ranks, self._memory = job, ranks, whole.memory
        with ranks.each("cut", [((), header | {"device": str(each)}) for each in devices[1:]]):
            self._mine = make_stepper(job, whole, whole.memory, devices[0], 0)
        self._share = _share(job, whole.memory, ranks.order, 0)
        self.vectors = SpreadVectors(whole.memory, self._share, self._work, ranks.turn)
        whole.vectors = self.vectors
        self._mine.part.free()
        self.replica = CutReplica(whole, self)
        self.inner = self._mine.inner

    def _work(self, order: Json) -> list[Answer]:
        """All ranks do their parts of the work. Raises ProcessLost, as this may be any thread."""
        try:
            with self._ranks.same("work", **order) as answers:
                mine = self._share.work(**order)
        except RanksEnded:
            raise self._ranks.error from None
        return [mine, *((answer.header, answer.arrays) for answer in answers)]

    def load_averaged(self, values: Array) -> None:
        with self._ranks.same("buffers", [values]):
            self._mine.part.load_averaged(values)

    def step(
        self,
        batches: Sequence[Weighted],
        *,
        own_lr: float | None = None,
        gather: bool = True,
        norm_max: float,
        epoch: int = 0,
        pull: Pull | None = None,
        fresh: bool = False,
        samples: int = 0,
    ) -> Stepped:
        """As `Stepper.step`. samples: unused, as there are no rows."""
        gradient = zeros_like(self.vectors.parameters) if gather else None
        toward = None if pull is None else self.vectors.holding(pull.toward)
        arguments: dict[str, Any] = {
            "own_lr": own_lr, "gather": self._number(gradient), "norm_max": norm_max,
            "epoch": epoch, "fresh": fresh,
            "pull": None if pull is None else [pull.strength, self._number(toward)],
        }  # fmt: skip
        if self._job.replica.tensor > 1:
            # Ranks with the same activations have to drop the same ones.
            arguments["seed"] = int(torch.randint(1 << 62, (), device="cpu"))
        self.vectors.free()
        shares = self._shares(batches)
        calls = []
        for share in shares[1:]:
            form, arrays = nested_tensors.packed([tuple(each) for each in share])
            calls.append((arrays, arguments | {"batches": form}))
        with self._ranks.each("step", calls) as answers:
            stepped, measured = self._mine.step(shares[0], **arguments)
            self.replica.values_averaged = self._mine.part.averaged()
        if not stepped.is_usable:
            return stepped
        metrics = [(weight_of(part, each), each.metrics) for part, each in measured]
        metrics += (each for answer in answers for each in answer.header["measured"])
        return stepped._replace(gradient=gradient, metrics=together(metrics))

    def _number(self, vector: Array | None) -> int | None:
        """The number of a vector in the memory of all ranks."""
        place = None if vector is None else self._memory.place(vector)
        return None if place is None else place[0]

    def _shares(self, batches: Sequence[Weighted]) -> list[list[Weighted]]:
        """The batches of each rank: with FSDP equally many, filled up with batches of weight 0."""
        count = self._job.replica.ranks
        if self._job.replica.fsdp == 1:
            return [[*batches]] * count
        each = -(-len(batches) // count)
        shares = [list(batches[n * each : (n + 1) * each]) for n in range(count)]
        return [share + [(batches[0][0], 0.0)] * (each - len(share)) for share in shares]

    # ------------------------------------------------------------ what is saved

    def state(self) -> dict[str, Array]:
        """The optimiser's state, as `InnerOptimizer.state` of a replica of one process."""
        with self._ranks.same("state") as answers:
            mine = self._mine.state()
        kept = dict(ChainMap(dict(mine), *(dict(_kept(answer)) for answer in answers)))
        places, found = self._places(), dict[str, Array]()
        for name, value in kept.items():
            if isinstance(value, int):
                assert self.inner is not None
                shape, lo, hi = places[self.inner.of_name(name)[0]]
                value = self._memory.array(value, lo, hi).reshape(shape)
            found[name] = value
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load what `state` returned, of a replica of any shape. Raises DlctlError."""
        if self.inner is None:
            return
        kept: dict[str, Array | int] = {n: array for n, array in state.items() if n != SCALER}
        places, whole = self._places(), dict[str, tuple[str, int, int]]()
        for name, array in state.items():
            index, key = self.inner.of_name(name)
            shape, lo, hi = places.get(index, ((), 0, 0))
            if array.shape == shape and array.ndim and array.dtype == np.float32:
                whole[name] = key, lo, hi
        keys = sorted({key for key, _, _ in whole.values()})
        for name, (key, lo, hi) in whole.items():
            kept[name] = at = STATES + keys.index(key)
            pages.copy(self._memory.array(at, lo, hi), state[name].reshape(-1))
        header, arrays = _answer_of(kept)
        with self._ranks.same("restore", arrays, **header):
            self._mine.restore(kept)

    def _places(self) -> dict[int, tuple[tuple[int, ...], int, int]]:
        """Index of each trained parameter -> its shape, and its range in a vector."""
        slices = self.replica.layout.slices(TRAINED)
        return {index: (entry.shape, lo, hi) for index, (entry, lo, hi) in enumerate(slices)}
