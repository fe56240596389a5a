"""A replica whose ranks are stages: each has some modules of a sequence, one behind the other.

Every stage runs the task's own loss. Modules of the stages before it are not computed: they give
what the stage before has sent; and behind the last module of its own, a stage sends on what that
gives and leaves the rest of the loss alone. So whatever lies ahead of the sequence is computed by
all stages, which have its parameters, and what lies behind it by the last one; gradients of these
parameters are summed up by the first stage, which steps them.

A step's micro-batches go through by GPipe's schedule, all forward and then all backward, or by 1F1B
(PipeDream-Flush): a stage goes backward as soon as it can, and keeps fewer activations.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from daemons.worker.cutting import Piece, piece
from daemons.worker.layout import find
from daemons.worker.nests import dtype_name, dtype_of, put_together, taken_apart
from daemons.worker.part import Part, Weighted
from daemons.worker.replica import Measured, in_numbers
from daemons.worker.sequences import Cut
from daemons.worker.task import TaskError, calling
from dlctl.flat import TRAINED, Layout

FORM_BYTES = 4096
"""Of what says which tensors come."""


class _Sent(KeyboardInterrupt):
    """A stage has sent on what it has come to, and the rest of the loss is not its to compute. No
    guard of the task's code stops such an error.
    """


class _Forward(NamedTuple):
    """What a stage keeps of a micro-batch until it goes backward."""

    came: list[Tensor]
    """What the stage before has sent, as far as it wants gradients."""
    went: list[Tensor]
    """What this one has sent, likewise; of the last one its loss."""


def schedule(kind: str, stage: int, stages: int, batches: int) -> Iterator[str]:
    """ "forward" and "backward", as a stage makes them, each in the order of the batches."""
    ahead = batches if kind == "gpipe" else min(stages - 1 - stage, batches)
    yield from ["forward"] * ahead
    for _ in range(batches - ahead):
        yield "forward"
        yield "backward"
    yield from ["backward"] * ahead


class Link:
    """To the stage before or behind, one way."""

    def __init__(self, group: Any, device: torch.device, ahead: int) -> None:
        """ahead: so many values may be on their way; who sends more waits for the first of them."""
        self._group, self._device, self._ahead = group, device, ahead
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()

    def send(self, value: Any, to: int) -> list[Tensor]:
        """Returns its tensors; they are on their way. Raises TaskError."""
        tensors: list[Tensor] = []
        form = taken_apart(value, tensors)
        kinds = [[dtype_name(t), list(t.shape), t.requires_grad] for t in tensors]
        told = json.dumps([form, kinds]).encode()
        if len(told) > FORM_BYTES:
            raise TaskError("a module of a stage returns too many tensors for the next stage")
        head = torch.zeros(FORM_BYTES, dtype=torch.uint8)
        head[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        flat = [tensor.detach().contiguous() for tensor in (head, *tensors) if tensor.numel()]
        self._sent.append([(dist.isend(each, to, group=self._group), each) for each in flat])
        self._wait(self._ahead)
        return tensors

    def receive(self, of: int) -> tuple[Any, list[Tensor]]:
        """What the rank has sent, as new tensors; and those of them that want gradients."""
        head = torch.zeros(FORM_BYTES, dtype=torch.uint8)
        dist.recv(head, of, group=self._group)
        form, kinds = json.loads(head.numpy().tobytes().rstrip(b"\0"))
        tensors = []
        for dtype, shape, wants in kinds:
            tensor = torch.empty(shape, dtype=dtype_of(dtype), device=self._device)
            if tensor.numel():
                dist.recv(tensor, of, group=self._group)
            tensors.append(tensor.requires_grad_(wants))
        return put_together(form, tensors), [each for each in tensors if each.requires_grad]

    def finish(self) -> None:
        """All of it has arrived."""
        self._wait(0)

    def _wait(self, but: int) -> None:
        while len(self._sent) > but:
            for work, _ in self._sent.popleft():
                work.wait()


def stage_pieces(
    model: nn.Module, layout: Layout, vector: Tensor, cut: Cut, device: torch.device, rank: int
) -> tuple[list[Piece], list[int]]:
    """Give a stage its values; and the numbers of the pieces that all stages have. Modules of the
    other stages stay without.
    """
    users: dict[int, set[int]] = {}
    inside: dict[int, int] = {}
    for stage, names in enumerate(cut.stages):
        for name in names:
            for _, each in model.get_submodule(name).named_parameters(remove_duplicate=False):
                users.setdefault(id(each), set()).add(stage)
                inside[id(each)] = inside.get(id(each), 0) + 1
    uses: dict[int, int] = {}
    for _, each in model.named_parameters(remove_duplicate=False):
        uses[id(each)] = uses.get(id(each), 0) + 1
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
            made.append(Piece(None, master, master, master, lo, hi, entry.shape, whole, False))
            continue
        local = vector[lo:hi].view(entry.shape).to(device, parameter.dtype)
        new = nn.Parameter(local)
        for name in (entry.name, *entry.aliases):
            path, _, key = name.rpartition(".")
            setattr(model.get_submodule(path), key, new)
        is_owned = rank == 0 if is_shared else True
        made.append(piece(new, new.detach(), entry.shape, lo, hi, whole, vector, is_owned))
    return made, shared


class StagePart(Part):
    """See `Part`. Every stage is given all micro-batches."""

    def __init__(
        self, *arguments: Any, cut: Cut, shared: Sequence[int], kind: str, **rest: Any
    ) -> None:
        self._stages = cut.stages
        super().__init__(*arguments, **rest)
        self._kind, self._shared = kind, shared
        # One each way, so that none waits for another that waits for it.
        ahead = len(cut.stages)  # With 1F1B what is older has arrived anyway.
        self._down, self._up = (Link(dist.new_group(), self.device, ahead) for _ in range(2))
        self._goes_backward = False
        """What modules compute now, they compute again, as activation checkpointing does."""
        self._is_last = self.rank == len(cut.stages) - 1
        self._came: tuple[Any, list[Tensor]] | None = None
        self._went: list[Tensor] = []
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
        if self._came is None:
            self._came = self._down.receive(self.rank - 1)
        else:
            self._check_that_it_came((values, named))
        return self._came[0]

    def _check_that_it_came(self, values: Any) -> None:
        """A module gets what the one before it has returned, or a stage would be without what the
        model does in between. Raises TaskError.
        """
        assert self._came is not None
        came = [id(each) for each in tree_leaves(self._came[0]) if isinstance(each, Tensor)]
        if not any(id(each) in came for each in tree_leaves(values)):
            what = "does something with a value between two modules of the sequence"
            raise self._out_of_order(what)

    def _too_early(self, *_: Any, **__: Any) -> Any:
        raise self._out_of_order("calls a module of a later stage first")

    def _checked(self, forward: Any) -> Any:
        def computed(*values: Any, **named: Any) -> Any:
            if self._came is not None and not self._goes_backward:
                self._check_that_it_came((values, named))
            return forward(*values, **named)

        return computed

    def _and_send(self, forward: Any) -> Any:
        def computed(*values: Any, **named: Any) -> Any:
            if self._goes_backward:
                return forward(*values, **named)
            if not (torch.is_grad_enabled() or self._is_last):
                raise self._without_gradients()
            if self.rank and self._came is None:
                raise self._out_of_order("calls no module of an earlier stage first")
            self._calls += 1
            if self._calls > 1:
                raise self._out_of_order("calls the modules of a stage more than once")
            result = forward(*values, **named)
            if self._is_last:
                return result
            went = self._down.send(result, self.rank + 1)
            self._went = [tensor for tensor in went if tensor.requires_grad]
            raise _Sent

        return computed

    def _without_gradients(self) -> TaskError:
        return TaskError(
            "a module of a stage is computed without gradients, so that stages before it would "
            "not be trained",
            where=self.task.place("loss"),
            hint="torch.utils.checkpoint does that with use_reentrant=True: use False",
        )

    def _out_of_order(self, what: str) -> TaskError:
        return TaskError(
            f"task.loss {what}: the model cannot be cut into these stages",
            where=self.task.place("loss"),
            hint="stages(model) of the task says in which order its modules are called",
        )

    # ---------------------------------------------------------------- a step

    def run(
        self, batches: Sequence[Weighted], step: int, epoch: int
    ) -> list[tuple[float, Measured]]:
        if not self.model.training:
            self.set_training()
        kept: deque[_Forward] = deque()
        measured: list[tuple[float, Measured]] = []
        waiting = deque(batches)
        for what in schedule(self._kind, self.rank, len(self._stages), len(batches)):
            if what == "forward":
                kept.append(self._forward(*waiting.popleft(), step, epoch, measured))
            else:
                self._backward(kept.popleft())
        self._down.finish()
        self._up.finish()
        self._sum_shared()
        return measured

    def _forward(
        self, batch: Any, part: float, step: int, epoch: int,
        measured: list[tuple[float, Measured]],
    ) -> _Forward:  # fmt: skip
        self._came, self._went, self._calls = None, [], 0
        try:
            loss = self.loss(batch, step, epoch)
        except _Sent:
            assert not self._is_last
        else:
            if not self._is_last or self._came is None:
                raise self._out_of_order(f"does not call the modules of stage {self.rank}")
            measured.append((part, in_numbers(loss)))
            self._went = [loss.value * part]
        return _Forward(self._came[1] if self._came is not None else [], self._went)

    def _backward(self, kept: _Forward) -> None:
        gradients: list[Tensor] | None = None
        if not self._is_last and kept.went:
            gradients, _ = self._up.receive(self.rank + 1)
        self._goes_backward = True
        with calling("the backward pass of task.loss", self.task.at("loss")):
            if kept.went:
                torch.autograd.backward(kept.went, gradients)
        self._goes_backward = False
        if kept.came:
            back = [torch.zeros_like(t) if t.grad is None else t.grad for t in kept.came]
            self._up.send(back, self.rank - 1)

    def _sum_shared(self) -> None:
        """Of parameters that all stages have the first one has the gradient of all."""
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


def shown(cut: Cut) -> str:
    """For the log: how much each stage has."""
    total = max(1, sum(cut.stage_bytes))
    parts = [
        f"{names[0]} to {names[-1]}: {size / total:.0%}"
        for names, size in zip(cut.stages, cut.stage_bytes, strict=True)
    ]
    return "; ".join(parts)
