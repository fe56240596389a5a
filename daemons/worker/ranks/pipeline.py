"""A replica whose ranks are pipeline stages: each has some consecutive modules of a sequence.

Every stage runs the task's own loss. Modules of earlier stages are not computed: they return what
the previous stage has sent. After its own last module, a stage sends the output to the next stage
and aborts the rest of the loss. So all stages compute what precedes the sequence, and have its
parameters; the last stage computes what follows the sequence. The first stage sums the gradients of
these shared parameters, and steps them.

A step's micro-batches follow GPipe's schedule, all forward and then all backward, or 1F1B
(PipeDream-Flush): a stage runs backward as soon as it can, and stores fewer activations.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from daemons.worker.nested_tensors import dtype_of, put_together, taken_apart
from daemons.worker.ranks.model_slices import ModelSlice, move_untrained, piece
from daemons.worker.ranks.model_stages import StagedModel, uses_of
from daemons.worker.ranks.rank_part import RankPart, Weighted, scaled
from daemons.worker.replica import Measured, in_numbers
from daemons.worker.task.model_tensors import find
from daemons.worker.task.user_task import TaskError, calling, dtype_name
from dlctl.model.flat import TRAINED, Layout

FORM_BYTES = 4096
"""Size of the header that describes the tensors that follow."""


class _Sent(KeyboardInterrupt):
    """A stage has sent its output; it does not compute the rest of the loss. The guards of the
    task's code let a KeyboardInterrupt pass.
    """


class _Forward(NamedTuple):
    """What a stage stores of a micro-batch until its backward pass."""

    inputs: list[Tensor]
    """The tensors from the previous stage that require gradients."""
    outputs: list[Tensor]
    """The tensors for the next stage that require gradients; the last stage's loss."""


def schedule(kind: str, stage: int, stages: int, batches: int) -> Iterator[str]:
    """The "forward" and "backward" passes of a stage, each kind in the order of the batches."""
    ahead = batches if kind == "gpipe" else min(stages - 1 - stage, batches)
    yield from ["forward"] * ahead
    for _ in range(batches - ahead):
        yield "forward"
        yield "backward"
    yield from ["backward"] * ahead


class StageLink:
    """One direction of the traffic between neighbouring stages."""

    def __init__(self, group: Any, device: torch.device, ahead: int) -> None:
        """ahead: how many values may be in flight; a further `send` waits for the oldest."""
        self._group, self._device, self._ahead = group, device, ahead
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()

    def send(self, value: Any, to: int) -> list[Tensor]:
        """Start to send a value; returns its tensors. Raises TaskError."""
        tensors: list[Tensor] = []
        form = taken_apart(value, tensors)
        kinds = [[dtype_name(t), list(t.shape), t.requires_grad] for t in tensors]
        encoded = json.dumps([form, kinds]).encode()
        if len(encoded) > FORM_BYTES:
            raise TaskError("a module of a stage returns too many tensors for the next stage")
        head = torch.zeros(FORM_BYTES, dtype=torch.uint8)
        head[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        flat = [tensor.detach().contiguous() for tensor in (head, *tensors) if tensor.numel()]
        self._sent.append([(dist.isend(each, to, group=self._group), each) for each in flat])
        self.wait(but=self._ahead)
        return tensors

    def receive(self, of: int) -> tuple[Any, list[Tensor]]:
        """The value that the rank has sent, with new tensors; and those that require gradients."""
        head = torch.zeros(FORM_BYTES, dtype=torch.uint8)
        dist.recv(head, of, group=self._group)
        form, kinds = json.loads(head.numpy().tobytes().rstrip(b"\0"))
        tensors = []
        for dtype, shape, wants in kinds:
            tensor = torch.empty(shape, dtype=dtype_of(dtype), device=self._device)
            if tensor.numel():
                dist.recv(tensor, of, group=self._group)
            tensors.append(tensor.requires_grad_(wants))
        return put_together(form, iter(tensors)), [each for each in tensors if each.requires_grad]

    def wait(self, but: int = 0) -> None:
        """Wait until all but the newest so many sends are complete."""
        while len(self._sent) > but:
            for work, _ in self._sent.popleft():
                work.wait()


def stage_pieces(
    model: nn.Module,
    layout: Layout,
    vector: Tensor,
    cut: StagedModel,
    device: torch.device,
    rank: int,
) -> tuple[list[ModelSlice], list[int]]:
    """Load the values of a stage; modules of other stages stay without values. Returns the pieces,
    and the numbers of those that all stages have.
    """
    move_untrained(model, device)
    users: dict[int, set[int]] = {}
    uses, inside = uses_of(model), Counter[int]()
    for stage, names in enumerate(cut.stages):
        for name in names:
            for _, each in model.get_submodule(name).named_parameters(remove_duplicate=False):
                users.setdefault(id(each), set()).add(stage)
                inside[id(each)] += 1
    made, shared = [], []
    for number, (entry, lo, hi) in enumerate(layout.slices(TRAINED)):
        parameter = find(model, entry.name)
        assert isinstance(parameter, nn.Parameter)
        mine, whole = users.get(id(parameter), set()), tuple(slice(0, n) for n in entry.shape)
        is_shared = len(mine) != 1 or inside[id(parameter)] < uses[id(parameter)]
        if is_shared:
            shared.append(number)
        if not is_shared and rank not in mine:
            master = vector[lo:hi].view(entry.shape)
            made.append(ModelSlice(None, master, master, master, lo, hi, entry.shape, whole, False))
            continue
        local = vector[lo:hi].view(entry.shape).to(device, parameter.dtype)
        new = nn.Parameter(local)
        for name in (entry.name, *entry.aliases):
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, new)
        is_owned = rank == 0 if is_shared else True
        made.append(piece(new, new.detach(), entry.shape, lo, hi, whole, vector, is_owned))
    return made, shared


class StagePart(RankPart):
    """The `RankPart` of a pipeline stage. Every stage gets all micro-batches."""

    def __init__(
        self, *arguments: Any, cut: StagedModel, shared: Sequence[int], kind: str, **rest: Any
    ) -> None:
        self._stages = cut.stages
        super().__init__(*arguments, **rest)
        self._kind, self._shared = kind, shared
        # One link for each direction, against deadlocks.
        ahead = len(cut.stages)  # With 1F1B older values have arrived anyway.
        self._down, self._up = (StageLink(dist.new_group(), self.device, ahead) for _ in range(2))
        self._is_backward = False
        """Modules that run now are recomputed, by activation checkpointing."""
        self._is_last = self.rank == len(cut.stages) - 1
        self._received: tuple[Any, list[Tensor]] | None = None
        self._outputs: list[Tensor] = []
        self._calls = 0
        self._replace_modules()

    def holder(self, name: str) -> int:
        for stage, modules in enumerate(self._stages):
            if any(name.startswith(f"{module}.") for module in modules):
                return stage
        return 0

    def _replace_modules(self) -> None:
        for stage, names in enumerate(self._stages):
            for name in names:
                module = self.model.get_submodule(name)
                if stage < self.rank:
                    module.forward = self._from_before
                elif stage > self.rank:
                    module.forward = self._too_early
                if stage == self.rank and name == names[0]:
                    module.forward = self._checked(module.forward)
                if stage == self.rank and name == names[-1]:
                    module.forward = self._and_send(module.forward)

    def _from_before(self, *values: Any, **named: Any) -> Any:
        if self._received is None:
            self._received = self._down.receive(self.rank - 1)
        else:
            self._check_input((values, named))
        return self._received[0]

    def _check_input(self, values: Any) -> None:
        """Check that a module gets the output of the previous one. If the model changes it in
        between, the stage would miss that change. Raises TaskError.
        """
        assert self._received is not None
        ids = [id(each) for each in tree_leaves(self._received[0]) if isinstance(each, Tensor)]
        if not any(id(each) in ids for each in tree_leaves(values)):
            raise self._out_of_order("changes a value between two modules of the sequence")

    def _too_early(self, *_: Any, **__: Any) -> Any:
        raise self._out_of_order("calls a module of a later stage first")

    def _checked(self, forward: Any) -> Any:
        def computed(*values: Any, **named: Any) -> Any:
            if self._received is not None and not self._is_backward:
                self._check_input((values, named))
            return forward(*values, **named)

        return computed

    def _and_send(self, forward: Any) -> Any:
        def computed(*values: Any, **named: Any) -> Any:
            if self._is_backward:
                return forward(*values, **named)
            if not (torch.is_grad_enabled() or self._is_last):
                raise TaskError(
                    "a module of a stage is computed without gradients, so earlier stages would "
                    "not be trained",
                    where=self.task.place("loss"),
                    hint="torch.utils.checkpoint does that with use_reentrant=True: use False",
                )
            if self.rank and self._received is None:
                raise self._out_of_order("calls no module of an earlier stage first")
            self._calls += 1
            if self._calls > 1:
                raise self._out_of_order("calls the modules of a stage more than once")
            result = forward(*values, **named)
            if self._is_last:
                return result
            sent = self._down.send(result, self.rank + 1)
            self._outputs = [tensor for tensor in sent if tensor.requires_grad]
            raise _Sent

        return computed

    def _out_of_order(self, what: str) -> TaskError:
        return TaskError(
            f"task.loss {what}: the model cannot be cut into these stages",
            where=self.task.place("loss"),
            hint="write stages(model), with the modules in the order of their calls",
        )

    # ---------------------------------------------------------------- a step

    def run(
        self, batches: Sequence[Weighted], step: int, epoch: int
    ) -> list[tuple[float, Measured]]:
        self.modes.train()
        kept: deque[_Forward] = deque()
        measured: list[tuple[float, Measured]] = []
        waiting = deque(batches)
        for what in schedule(self._kind, self.rank, len(self._stages), len(batches)):
            if what == "forward":
                kept.append(self._forward(*waiting.popleft(), step, epoch, measured))
            else:
                self._backward(kept.popleft())
        self._down.wait()
        self._up.wait()
        self._sum_shared()
        return measured

    def _forward(
        self, batch: Any, part: float, step: int, epoch: int,
        measured: list[tuple[float, Measured]],
    ) -> _Forward:  # fmt: skip
        self._received, self._outputs, self._calls = None, [], 0
        try:
            loss = self.loss(batch, step, epoch)
        except _Sent:
            assert not self._is_last
        else:
            if not self._is_last or self._received is None:
                raise self._out_of_order(f"does not call the modules of stage {self.rank}")
            measured.append((part, in_numbers(self.task, loss)))
            self._outputs = [scaled(loss, part)]
        return _Forward(self._received[1] if self._received is not None else [], self._outputs)

    def _backward(self, kept: _Forward) -> None:
        gradients: list[Tensor] | None = None
        if not self._is_last and kept.outputs:
            gradients, _ = self._up.receive(self.rank + 1)
        self._is_backward = True
        with calling("the backward pass of task.loss", self.task.at("loss")):
            if kept.outputs:
                torch.autograd.backward(kept.outputs, gradients)
        self._is_backward = False
        if kept.inputs:
            back = [torch.zeros_like(t) if t.grad is None else t.grad for t in kept.inputs]
            self._up.send(back, self.rank - 1)

    def _sum_shared(self) -> None:
        """Sum the gradients of parameters that all stages have, in the first stage."""
        mine = [self.pieces[number].parameter for number in self._shared]
        if not mine:
            return
        has = torch.tensor([float(p.grad is not None) for p in mine if p is not None])
        dist.all_reduce(has)
        for parameter, count in zip(mine, has.tolist(), strict=True):
            assert parameter is not None
            if not count:
                continue
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            dense = gradient.to_dense() if gradient.is_sparse else gradient.contiguous()
            dist.reduce(dense, 0)
            parameter.grad = dense if self.rank == 0 else None


def shown(cut: StagedModel) -> str:
    """The modules of each stage and their part of the parameter bytes, for the log."""
    total = max(1, sum(cut.stage_bytes))
    parts = [
        f"{names[0]} to {names[-1]}: {size / total:.0%}"
        for names, size in zip(cut.stages, cut.stage_bytes, strict=True)
    ]
    return "; ".join(parts)
