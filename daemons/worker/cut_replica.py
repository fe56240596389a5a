"""A replica that is cut over several processes, `[replica]`: what all ranks do, and rank 0.

Rank 0 is the worker, whose method reads and writes the parameters in the replica's memory on the
host, and which evaluates by itself, with a whole model of which the values are these. The other
ranks are told what to do (`ranks.py`) and do it with their slices.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from daemons.worker import nests
from daemons.worker.cutting import (
    Piece,
    cut_by_fsdp,
    cut_by_tensors,
    pieces,
    without_values,
)
from daemons.worker.out_of_memory import explained
from daemons.worker.part import Kept, Part, PartStepper, Weighted, together
from daemons.worker.pipeline import StagePart, shown, stage_pieces
from daemons.worker.rank_group import on_loopback
from daemons.worker.rank_memory import GIVEN, GRADIENT, PARAMETERS, STATES, RankMemory, others
from daemons.worker.rank_messages import Said
from daemons.worker.ranks import Ranks
from daemons.worker.replica import Measured, Replica
from daemons.worker.sequences import cut
from daemons.worker.stepper import SCALER, Stepped
from daemons.worker.task import TaskError
from dlctl import parameter_groups
from dlctl.algorithms.needs import Pull
from dlctl.config import JobFile
from dlctl.errors import DlctlError
from dlctl.flat import TRAINED, Layout
from dlctl.messages import Array

log = logging.getLogger("dlctl")

M_MMAP_THRESHOLD = -3
GIVES_BACK_BYTES = 1 << 18


class WholeReplica(Replica):
    """The model of rank 0 as a whole, on the CPU; to evaluate it goes to the device."""

    evaluates_on = torch.device("cpu")

    @contextmanager
    def _at(
        self, parameters: npt.NDArray[np.float32], averaged: npt.NDArray[np.float64]
    ) -> Iterator[None]:
        with super()._at(parameters, averaged):
            if self.evaluates_on.type == "cpu":
                yield
                return
            self.model.to(self.evaluates_on)
            try:
                yield
            finally:
                self.model.to("cpu")


# ---------------------------------------------------------------- what every rank does


def make_stepper(
    job: JobFile, whole: Replica, memory: RankMemory, device: torch.device, rank: int
) -> PartStepper:
    """Cut a whole model and keep the rank's part. All ranks call this; they are in their group.
    Raises TaskError, DlctlError.
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
            part: Part = StagePart(
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
                    hint="use fully_shard or parallelize_module on the mesh that it is given",
                )
            mine = pieces(task, model, layout, vector, device, rank)
            part = Part(
                task, model, layout, mine, memory, device, tells=by_fsdp or rank == 0, **about
            )
    gc.collect()  # The whole model, which nobody has any more.
    return PartStepper(part, job, _groups(job, layout))


def give_memory_back() -> None:
    """Have tensors of some size go back to the system when they are freed. What FSDP gathers comes
    and goes; glibc learns from that to keep it, in pieces that the next ones do not fit into, and
    a rank would have twice what it needs.
    """
    with suppress(AttributeError):  # Another C library.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, GIVES_BACK_BYTES)


def _groups(job: JobFile, layout: Layout) -> list[Any]:
    numbers = parameter_groups.of_trained(job.parameters, layout)
    return [None if n == parameter_groups.NONE else job.parameters[n] for n in numbers]


def digest(layout: Layout) -> str:
    return hashlib.sha256(layout.to_bytes()).hexdigest()


class PartCalls:
    """What a later rank makes of the calls of rank 0."""

    def __init__(self, job: JobFile, whole: Replica, memory: int, rank: int) -> None:
        """memory: a file that all ranks have open."""
        self._job, self._rank = job, rank
        self._whole: Replica | None = whole
        self._file = memory
        self._stepper: Any = None

    def make(self, call: Said) -> tuple[dict[str, Any], Sequence[Array]]:
        """What rank 0 is told of it. Raises TaskError, DlctlError."""
        match call.kind:
            case "cut":
                self._cut(call.header["layout"], torch.device(call.header["device"]))
            case "step":
                return self._step(call), ()
            case "buffers":
                self._stepper.part.load_averaged(call.arrays[0])
            case "state":
                kept = self._stepper.state()
                arrays = [each.array for each in kept if each.array is not None]
                return {"kept": [[k.name, k.vector] for k in kept]}, arrays
            case "restore":
                self._stepper.restore(_kept(call))
        return {}, ()

    def _cut(self, layout: str, device: torch.device) -> None:
        assert self._whole is not None
        whole, self._whole = self._whole, None  # Nobody needs its memory any more.
        if digest(whole.layout) != layout:
            raise DlctlError(
                "the model is not that of rank 0",
                hint="the task's code has to build the same model in every process",
            )
        memory = RankMemory(self._file, whole.layout.size())
        self._stepper = make_stepper(self._job, whole, memory, device, self._rank)

    def _step(self, call: Said) -> dict[str, Any]:
        said = dict(call.header)
        batches = nests.unpacked(said.pop("batches"), call.arrays)
        with explained(self._job, said.pop("batch_size")):
            _, measured = self._stepper.step(batches, **said)
            self._stepper.part.averaged()
        return {"measured": [[part, each.metrics] for part, each in measured if each.metrics]}


def _kept(said: Said) -> list[Kept]:
    arrays = iter(said.arrays)
    return [Kept(name, at, None if at else next(arrays)) for name, at in said.header["kept"]]


# ---------------------------------------------------------------- rank 0


class CutReplica:
    """What the worker has of its replica: see `Replica`, whose part this takes."""

    def __init__(self, whole: WholeReplica, ranks: Ranks, stepper: PartStepper) -> None:
        self.whole, self.ranks, self._stepper = whole, ranks, stepper
        self.task, self.layout, self.parameters = whole.task, whole.layout, whole.parameters
        self.device, self.lacks_weights = stepper.part.device, False
        self.rows = None
        self.values_averaged: Array = whole.averaged()
        self.evaluate, self.finish = whole.evaluate, whole.finish
        self.reseed, self.frozen = whole.reseed, whole.frozen

    def averaged(self) -> Array:
        """As they were after the last step: float64[n]."""
        return self.values_averaged

    def load_averaged(self, values: Array) -> None:
        self.ranks.call("buffers", [values])
        self._stepper.part.load_averaged(values)
        self.ranks.done()
        self.values_averaged = np.array(values)

    def load_frozen(self, values: Mapping[int, Tensor]) -> None:
        if values:
            raise DlctlError(
                "this worker's model has other frozen parameters than the run, and each process "
                "of its replica has built them",
                hint="have model() build the same ones everywhere, or give job.weights",
            )


class CutStepper:
    """See `Stepper`, whose place this takes in the worker."""

    def __init__(
        self, job: JobFile, whole: WholeReplica, ranks: Ranks, devices: Sequence[torch.device]
    ) -> None:
        """ranks: started. devices: of each. Raises TaskError, DlctlError, RanksEnded."""
        ranks.meet(devices[0].type)
        memory = RankMemory(ranks.memory, whole.layout.size())
        whole.move_to(memory.vector(PARAMETERS))
        whole.evaluates_on = devices[0]
        told = {"layout": digest(whole.layout)}
        self._job, self._ranks, self._memory = job, ranks, memory
        with self._all([((), told | {"device": str(device)}) for device in devices[1:]], "cut"):
            self._mine = make_stepper(job, whole, memory, devices[0], 0)
        self._saves_memory = devices[0].type == "cpu"  # Else the host has what the ranks have not.
        self._others = [*others(map(Piece.elements, self._mine.part.pieces), memory.size)]
        self._lending = threading.RLock()  # A gradient may go while this thread has it.
        self._lent = 0
        """Gradients that were handed out; the newest one lies in the memory of all."""
        self.replica = CutReplica(whole, ranks, self._mine)
        self.inner = self._mine.inner

    @contextmanager
    def _all(
        self, calls: Sequence[tuple[Sequence[Array], dict[str, Any]]], kind: str
    ) -> Iterator[None]:
        """Each of the other ranks makes its call meanwhile, and has made it then."""
        self._ranks.call_each(kind, calls)
        try:
            yield
        except Exception:
            self._ranks.blame()
            raise
        self._ranks.done()

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
        """samples: nobody asks here, as there are no rows."""
        told: dict[str, Any] = {
            "own_lr": own_lr, "gather": gather, "norm_max": norm_max, "epoch": epoch,
            "pull": None if pull is None else pull.strength, "fresh": fresh,
        }  # fmt: skip
        if self._job.replica.tensor > 1:
            # Where all ranks have the same activations, they have to drop the same ones.
            told["dice"] = int(torch.randint(1 << 62, (), device="cpu"))
        self._begin()
        if pull is not None:
            self._memory.vector(GIVEN).copy_(torch.from_numpy(pull.toward))
        shares = self._shares(batches)
        size = self._job.workers.batch_size
        calls = []
        for share in shares[1:]:
            form, arrays = nests.packed([tuple(each) for each in share])
            calls.append((arrays, told | {"batches": form, "batch_size": size}))
        with self._all(calls, "step"):
            stepped, measured = self._mine.step(shares[0], **told)
            self.replica.values_averaged = self._mine.part.averaged()
        if not stepped.is_usable:
            return stepped
        gradient = self._lend() if gather else None
        return stepped._replace(gradient=gradient, metrics=self._metrics(measured))

    def _begin(self) -> None:
        """Have no more in memory than the ranks compute with."""
        if not self._saves_memory:
            return
        with self._lending:
            self._lent += 1
            self._memory.clear(GRADIENT)
        self._memory.let_go(self._others)

    def _lend(self) -> Array:
        """The gradient of all ranks. Its memory is given back when nobody has it any more."""
        gradient: Array = self._memory.vector(GRADIENT).numpy()
        if self._saves_memory:
            weakref.finalize(gradient, self._came_back, self._lent).atexit = False
        return gradient

    def _came_back(self, number: int) -> None:
        with self._lending:
            if number == self._lent:
                self._memory.clear(GRADIENT)

    def _shares(self, batches: Sequence[Weighted]) -> list[list[Weighted]]:
        """The batches of each rank: with FSDP as many for each, of no weight if there are none."""
        count = self._job.replica.ranks
        if self._job.replica.fsdp == 1:
            return [[*batches]] * count
        each = -(-len(batches) // count)
        shares = [list(batches[n * each : (n + 1) * each]) for n in range(count)]
        return [share + [(batches[0][0], 0.0)] * (each - len(share)) for share in shares]

    def _metrics(self, mine: Sequence[tuple[float, Measured]]) -> dict[str, float]:
        told = [each for said in self._ranks.told() for each in said.header["measured"]]
        return together([(part, each.metrics) for part, each in mine] + told)

    # ------------------------------------------------------------ what is saved

    def state(self) -> dict[str, Array]:
        """As `InnerOptimizer.state` of a replica of one process."""
        with self._same("state"):
            kept = self._mine.state()
        for said in self._ranks.told():
            kept += _kept(said)
        slices, found = self.replica.layout.slices(TRAINED), dict[str, Array]()
        places = [(entry.shape, lo, hi) for entry, lo, hi in slices]
        for name, at, array in kept:
            if array is None:
                assert self.inner is not None
                shape, lo, hi = places[self.inner.of_name(name)[0]]
                array = self._memory.vector(at)[lo:hi].view(shape).numpy()
            found.setdefault(name, array)
        return found

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from what `state` was, of a replica of any shape. Raises DlctlError."""
        if self.inner is None:
            return
        places = [(entry.shape, lo, hi) for entry, lo, hi in self.replica.layout.slices(TRAINED)]
        kept, slices = [], dict[str, int]()
        for name, array in state.items():
            index, _ = self.inner.of_name(name)
            is_whole = 0 <= index < len(places) and array.shape == places[index][0] and array.ndim
            if is_whole and array.dtype == np.float32:
                slices[name] = index
            elif name != SCALER:
                kept.append(Kept(name, 0, array))
        keys = sorted({self.inner.of_name(name)[1] for name in slices})
        for name, index in slices.items():
            shape, lo, hi = places[index]
            at = STATES + keys.index(self.inner.of_name(name)[1])
            self._memory.vector(at)[lo:hi].view(shape).copy_(torch.from_numpy(state[name].copy()))
            kept.append(Kept(name, at, None))
        arrays = [each.array for each in kept if each.array is not None]
        with self._same("restore", arrays, kept=[[k.name, k.vector] for k in kept]):
            self._mine.restore(kept)

    def _same(self, kind: str, arrays: Sequence[Array] = (), **header: Any) -> Any:
        return self._all([(arrays, header)] * (self._job.replica.ranks - 1), kind)
