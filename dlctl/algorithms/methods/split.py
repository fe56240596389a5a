"""Split learning: one model, divided among parties. Gupta and Raskar, "Distributed learning of deep
neural network over multiple agents", 2018; the U shape: Vepakomma et al., "Split learning for
health", 2018; NoPeek: Vepakomma et al., "NoPeek: Information leakage reduction to share activations
in distributed deep learning", 2020.

Clients have the data x and the layers f up to the cut, the head has the layers h behind it. For
every batch

    vanilla      client: z = f(x), sends z and the labels y
                 head:   L = loss(h(z), y), steps h along dL/dh, answers dL/dz
                 client: steps f along dL/dz df

    u            client: z = f(x), sends z          head: answers a = h(z)
                 client: L = loss(t(a), y), steps its own top layers t, sends dL/da
                 head:   steps h along dL/da dh, answers dL/dz
                 client: steps f along dL/dz df

With `alpha` the loss of f is L + alpha dCor(x, z), NoPeek's distance correlation of a batch. It is
computed by the client, which alone has x. It is the biased one, which has a gradient; `u_dcor2`,
among the metrics of the loss, is the unbiased estimate of its square (Szekely and Rizzo 2014): it
is about 0 for independent x and z, and may be negative.

Which clients work (`clients`):

    turn         one after the other, a portion each, and each reads the f that the one before it
                 has left on the clients' server: the updates are those of one process on the same
                 batches. The paper hands f on in the same order.
    parallel     all at once: f is averaged by samples after each round of H batches
                 (`local_steps`). SplitFed (Thapa et al., 2022), with either head (`heads`):

                 one     V2: the head steps its h with one client after the other, as they ask
                 each    V1: each client k has an h_k, which begins the round as the average of all
                         and is averaged like its f_k

In a round of H = 1 a client makes no step of its own: the average after it is a step of the
servers' optimiser along the mean of the gradients, by samples. With H > 1

    round:  client k:    f_k = f;   H times: f_k = f_k - r dL/df_k        # r: the rate of `[inner]`
            head (V1):   h_k = h;   H times: h_k = h_k - r dL/dh_k
            servers:     f = outer(f, sum n_k (f - f_k) / n), h likewise  # n_k samples, n of all
            head (V2):   h = outer(h, r dL/dh) for each batch

With outer = SGD, lr 1, the default then, that is f = sum n_k/n f_k, the paper's FedAvg. A round of
a client ends with its portion, if that has fewer batches: so a large H is a portion a round.

- Every step of f and t is a push to the clients' server, every step of h one to the head's server,
  which make it by `[optimizer]`. So their state survives every process, and a worker that is
  replaced begins with it.
- A batch is in h once. The head's server remembers, with its values, how far each client got in its
  last two portions, and the head its answers to the furthest batches; so a client has one portion
  at a time, whatever `lease_ahead_s` is. If a client dies in the middle of a batch, its portion is
  leased again, from its first batch on, and the batch that was under way is answered as before.
  With `turn` f has each batch once, too; with `parallel` f may have those of a dead client twice,
  as with sync.
- A run that resumes with batches or portions of other sizes, or with another seed, does not know a
  batch of before again: those of an epoch that was not complete, or of a portion that was not, are
  computed anew, as with every method.
- A head that dies while the run drains, or over the last evaluation, is replaced. Once the last
  checkpoint has begun it is not, and one that is still starting does not come any more: a `finish`
  that asks it ends with an error that says so. The model is complete in that checkpoint.
- If the head dies between its step and its answer, the answer is computed again, with the h after
  the step: this gradient of f is that of a model that is one step newer. Nothing else of the run
  depends on when a process dies.
- With `parallel`, one head and "u", other clients may step h between the two halves of a batch: its
  dL/dz is then that of the newer h at the older a. With a head for each they cannot.
- With a head for each client the steps of h are gathered on the head's server as they come, and
  make the average when the first client asks in the next round, or when all have drained; so a
  checkpoint in between has them beside h. If the head is drained while clients go on, as by
  `dlctl restart`, the average is made in two.
- With H > 1 the rate of `[inner]` is constant: the head has no data, so it does not know how far a
  `[schedule]` would be.
- A client that dies in the middle of a round takes its f_k with it: the batches are leased again,
  and are in f by the round of whoever has them then. In h they are already, once.
- A head that dies in the middle of a round takes no step with it, but where each h_k was: the next
  process goes on from h. What h_k had come to and what it comes to from there are two models of the
  average, each with its samples.
- If the gradient of a client is discarded (NaN, infinite, too large), h has made its step.
- A message has z, y and gradients of them; x, f and t stay with the clients, and so does y with
  "u". The clients' values are on their own server, which no other party can connect to. Checkpoints
  have the values of all parties and are on the machine of the coordinator, which has all keys.
- What z and the gradients reveal about x and y is another question. On the digits (5 seeds, means)
  alpha 0, 0.2, 0.5, 1 gives a u-dCor^2 of 0.76, 0.44, 0.31, 0.24, an error of an attacker's decoder
  of 0.093, 0.111, 0.148, 0.163 (0.300 without z), and an accuracy of 0.968, 0.969, 0.958, 0.909.
  With "vanilla" the norm of dL/dz alone tells a label with an AUC of 0.6 to 0.66, alpha or not.
  Less leakage in one attack is no guarantee of privacy.
- Evaluations ask the head for h(z) of the test data, in eval mode.
- The buffers of f (BatchNorm) are averaged by samples with `parallel`. Clients in turn hand them on
  with f: each push has those after its batch, and a batch that f has had changes them no more.
- The head has no buffers and no frozen parameters. With "u" it computes h(z) once more
  for the gradient, so dropout there would be another one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from annotated_types import Ge

from dlctl import registry
from dlctl.algorithms import barrier, stepwise
from dlctl.algorithms.base import (
    Answer,
    Fault,
    Lead,
    Method,
    Needs,
    PushKind,
    PushOutcome,
    ReplicaSide,
    Shape,
    ShardSide,
    Start,
)
from dlctl.algorithms.needs import (
    Engine,
    Gradient,
    Need,
    NextBatch,
    NextData,
    Read,
    Receipt,
    Step,
    Write,
)
from dlctl.algorithms.roster import IDLE
from dlctl.algorithms.rounds import Rounds
from dlctl.compress.base import Delta
from dlctl.errors import RemoteProtocolError
from dlctl.job import schedule
from dlctl.job.config import CLIENT, COUNT_MAX, HEAD, Choice, JobFile
from dlctl.model.parts import Part
from dlctl.model.vector import copy_into, to_host
from dlctl.optim.base import Optimizer
from dlctl.optim.gathered import FOLDS, GATHERED, TAKES, Gathered
from dlctl.optim.matrices import MatrixOptimizer
from dlctl.shards.base import Shard
from dlctl.wire import messages
from dlctl.wire.messages import APPLIED, BUFFERED, LATE, REFUSED, Array, Json

BEGIN, END = 1, 2
"""The parts of pushes without samples: the head begins a step of the clients, or has seen all."""
SAMPLES_MIN = 4
"""Of a batch with a distance correlation: U-centring divides by n - 3."""
PORTIONS_MAX = 2**24
"""Portions of a data epoch that have numbers of their own in `clock_of`."""
KEY_LIMITS = (2**24, PORTIONS_MAX, 2**31, COUNT_MAX, IDLE)
"""Of the numbers of a `BatchKey`: what is made of them fits into a push."""
STEP, FORWARD, BACKWARD, PREDICT = "step", "forward", "backward", "predict"
"""What a client asks the head: a batch of "vanilla"; both halves of one of "u"; an evaluation."""
TENSORS = {STEP: 2, FORWARD: 1, BACKWARD: 1, PREDICT: 1}
"""Tensors in a question. Each is two arrays: its elements, and int64[n], its shape."""


@dataclass(slots=True, kw_only=True)
class Options:
    shape: Literal["vanilla", "u"] = "vanilla"
    """Who has the labels and the last layers: "vanilla": the head; clients send the labels. "u":
    the clients, whose tasks have `top_model()`."""
    clients: Literal["turn", "parallel"] = "turn"
    """Whether clients work one after the other, or all at once with f averaged after each round."""
    local_steps: Annotated[int, Ge(1)] = 1
    """With `clients = "parallel"`: batches of a client from one average to the next, H. 1: the
    average is that of gradients, and `[optimizer]` steps along it. More: clients and head make
    steps by `[inner]`, plain SGD, and the average is that of where they have come to."""
    heads: Literal["one", "each"] = "one"
    """With `clients = "parallel"`: "one": all clients step one h, one after the other (SplitFed
    V2); "each": each steps an h of its own, and these are averaged after each round (V1)."""
    alpha: Annotated[float, Ge(0)] = 0.0
    """NoPeek: the weight of the distance correlation of x and z in a client's loss. Above 0 a batch
    needs four samples."""


class BatchKey(NamedTuple):
    """The batch that a question is about: the same for whoever computes it."""

    data_epoch: int
    portion: int
    number: int
    slot: int
    """Of the client that asks."""
    round: int = 0
    """That clients work in together, if they do."""

    @property
    def key(self) -> tuple[int, int, int]:
        return self[:3]

    def to_array(self) -> Array:
        return np.array(self, np.int64)

    @classmethod
    def of_array(cls, array: Array) -> BatchKey:
        """Raises RemoteProtocolError for an array that `to_array` would not make."""
        is_key = array.dtype == np.int64 and array.shape == (len(cls._fields),)
        if not is_key or (array < 0).any() or (array >= KEY_LIMITS).any():
            raise RemoteProtocolError("it does not say which batch it is about")
        return cls(*array.tolist())


def clock_of(data_epoch: int, portion: int) -> int:
    """The clock of a push of one batch: one number for each portion."""
    return data_epoch * PORTIONS_MAX + portion


def part_of(number: int, slot: int) -> int:
    """The part of a push of one batch: which of its portion, and the client. 0 is no such push."""
    return 1 + number * COUNT_MAX + slot


# ---------------------------------------------------------------- replicas


class Answered(NamedTuple):
    """What the head has answered to a batch of a client."""

    key: tuple[int, int, int]
    answers: dict[str, tuple[Array, ...]]
    """Operation -> its answer."""
    z: tuple[Array, ...] = ()
    """z and its shape, of the first half of a batch of "u"."""

    def is_of(self, portion: tuple[int, int]) -> bool:
        return self.key[:2] == portion


@dataclass(slots=True)
class OwnHead:
    """The h of one client, as far as it has come in a round."""

    h: Array
    """float32[d]."""
    samples: int = 0
    """Of the batches that it has stepped with."""


def furthest(known: Iterable[Answered]) -> list[Answered]:
    """The last batch of a portion among these, if there is any."""
    return sorted(known, key=lambda each: each.key)[-1:]


class Replica(ReplicaSide):
    options: Options

    @classmethod
    def one_push(cls, options: Options) -> PushKind:
        return PushKind(options.local_steps, is_displacement=options.local_steps > 1)

    @classmethod
    def hands_on_buffers(cls, options: Options) -> bool:
        return options.clients == "turn"

    def begin(self, start: Start) -> None:
        self.in_rounds = self.options.local_steps > 1
        if self.in_rounds and self.role != HEAD:
            self.rounds = self.arrival = Rounds(self)
        self.own: dict[int, OwnHead] = {}
        """Of the head, where each client has an h: slot -> that of this round."""
        self.first = np.zeros(0, np.float32)
        """The h that all of them have begun with."""
        self.answered: dict[int, list[Answered]] = {}
        """Slot of a client -> its newest batch, behind the furthest ones of its last two portions.
        """
        self.round = 0
        """That clients work in together: of a client its own, of the head the newest."""
        self.steps = self.repeated = 0
        """Of the head: batches that it has stepped with; answers from memory."""

    def changes_parameters(self) -> bool:
        return self.in_rounds

    def question(self, batch: tuple[int, int, int], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return (BatchKey(*batch, self.slot, self.round).to_array(), *arrays)

    def run(self) -> Needs:
        if self.role == HEAD:
            return self._head()
        if self.options.clients == "turn":
            return self._in_turn()
        return self._in_rounds() if self.in_rounds else self._in_parallel()

    def _head(self) -> Needs:
        """The head has no data: it only answers (`serve`)."""
        while True:
            yield NextData()

    def _in_turn(self) -> Needs:
        while True:
            batch: NextBatch | None = yield NextData()
            if batch is None:
                continue
            yield Read(wait=True, after_own=True)
            computed: Step | None = yield Gradient()  # It asks the head.
            if computed is not None:
                self.residual += computed.gradient
                yield Write(
                    vector=self.residual,
                    samples=computed.samples,
                    clock=clock_of(batch.data_epoch, batch.portion),
                    part=part_of(batch.number, self.slot),
                )

    def _in_parallel(self) -> Needs:
        self.round = yield from barrier.join()
        while True:
            samples = yield from stepwise.accrue(self)
            yield stepwise.write(self, samples, self.round)
            self.round = yield from barrier.next_step(self.round)

    def _in_rounds(self) -> Needs:
        self.round = yield from barrier.join()
        while True:
            samples = yield from self.rounds.steps(self.options.local_steps, in_portion=True)
            if samples and self.rounds.end():
                yield self.write_residual(samples=samples, clock=self.round)
            else:
                self.rounds.close()
                yield Write(vector=None, clock=self.round)
            self.round = yield from barrier.next_step(self.round)

    def leave(self) -> Iterable[Need]:
        """All clients have drained: nobody begins another round."""
        if self.role == HEAD and self.options.heads == "each":
            self.own.clear()  # What is still asked goes on from the average.
            yield self._fold(0, END)
            self.round = IDLE  # What is asked from now on, as by `finish`, pushes nothing.

    # ------------------------------------------------------------ the head

    def serve(self, op: str, arrays: tuple[Array, ...]) -> Answer:
        if self.role != HEAD or op not in TENSORS:
            raise RemoteProtocolError(f"there is no {op:.20} here")
        if len(arrays) != 1 + 2 * TENSORS[op]:
            raise RemoteProtocolError(f"{op} with {len(arrays)} arrays")
        batch, tensors = BatchKey.of_array(arrays[0]), arrays[1:]
        for elements, shape in zip(tensors[::2], tensors[1::2], strict=True):
            check_tensor(elements, shape)
        if tensors[0].dtype != np.float32:
            raise RemoteProtocolError(f"its first tensor is {tensors[0].dtype}, not float32")
        if op == PREDICT:
            return self._predict(batch, tensors)
        if (kept := self._kept(batch, op)) is not None:
            self.repeated += 1
            return kept
        if op == STEP:
            return self._step(batch, op, tensors)
        if op == FORWARD:
            return self._forward(batch, tensors)
        first = self._first_half(batch)
        return self._step(batch, op, (*first, *tensors)) if first else ()

    def _kept(self, batch: BatchKey, op: str) -> tuple[Array, ...] | None:
        """The answer to this batch, whichever client had it; None: it is not known."""
        known = (each.answers for each in self._known() if each.key == batch.key)
        return next((answers[op] for answers in known if op in answers), None)

    def _first_half(self, batch: BatchKey) -> tuple[Array, ...]:
        """z of a batch, which the client has sent; (): to another process of the head."""
        return next((each.z for each in self._known() if each.key == batch.key), ())

    def _known(self) -> Iterator[Answered]:
        return (each for known in self.answered.values() for each in known)

    def _keep(
        self, batch: BatchKey, op: str, answer: tuple[Array, ...], z: tuple[Array, ...] = ()
    ) -> None:
        portion, mine = batch.key[:2], self.answered.get(batch.slot, [])
        kept = next((e for e in mine if e.key == batch.key), Answered(batch.key, {}, z))
        kept.answers[op] = answer
        # Whoever takes up the portion of a dead client begins it anew, and the batch that is in h
        # and perhaps not in f is still to come.
        ahead = (e for e in self._known() if e.is_of(portion) and e.key > batch.key)
        others = [e for e in mine if not e.is_of(portion)]
        before = (e for e in others if e.is_of(others[-1].key[:2]))
        self.answered[batch.slot] = [*furthest(before), *furthest(ahead), kept]

    def _predict(
        self, batch: BatchKey, tensors: tuple[Array, ...]
    ) -> Generator[Need, Any, tuple[Array, ...]]:
        yield from self._begin_round(batch)
        yield Read(wait=True, after_own=True)
        answer: tuple[Array, ...] = yield Engine(op=PREDICT, arrays=tensors)
        return answer

    def _begin_round(self, batch: BatchKey) -> Generator[Need, Any, None]:
        """A client that asks in a round has the average of the one before: that is complete."""
        if self.options.heads == "each" and batch.round > self.round:
            yield self._fold(batch.round, BEGIN)
            self.round = batch.round
            self.own.clear()

    def _fold(self, clock: int, part: int) -> Write:
        return Write(vector=None, clock=clock, part=part, holds_steps=False, wait=True)

    def _forward(
        self, batch: BatchKey, tensors: tuple[Array, ...]
    ) -> Generator[Need, Any, tuple[Array, ...]]:
        yield from self._at_h(batch)
        answer: tuple[Array, ...] = yield Engine(op=FORWARD, arrays=tensors)
        self._keep(batch, FORWARD, answer, tensors)
        return answer

    def _step(
        self, batch: BatchKey, op: str, tensors: tuple[Array, ...]
    ) -> Generator[Need, Any, tuple[Array, ...]]:
        """Step h, at most once for this batch, and answer."""
        yield from self._at_h(batch)
        *answer, gradient = yield Engine(op=op, arrays=tensors)
        if np.isfinite(gradient).all():  # Else the client discards the batch, too.
            samples = int(tensors[1][0])
            step = gradient * np.float32(self.own_rate(0)) if self.in_rounds else gradient
            receipt: Receipt = yield Write(
                vector=self._pushed(batch.slot, step, samples),
                samples=samples,
                clock=clock_of(batch.data_epoch, batch.portion),
                part=part_of(batch.number, batch.slot),
                wait=True,
            )
            if not {LATE, REFUSED} & {*receipt.outcomes.values()}:
                self._step_own(batch.slot, step, samples)
            self.steps += 1
        self._keep(batch, op, tuple(answer))
        return tuple(answer)

    # ------------------------------------------------------------ an h for each client

    def _at_h(self, batch: BatchKey) -> Generator[Need, Any, None]:
        """Have the model at the h that this batch is computed with."""
        yield from self._begin_round(batch)
        own = self.own.get(batch.slot)
        if own is not None:
            copy_into(self.parameters, own.h)
            return
        yield Read(wait=True, after_own=True)
        if self.in_rounds and self.options.heads == "each":
            self.first = to_host(self.parameters).copy()
            self.own[batch.slot] = OwnHead(self.first.copy())

    def _pushed(self, slot: int, step: Array, samples: int) -> Array:
        """What is pushed of a step. The server divides the sum of samples * push by all samples.

        That has to come to sum n_k D_k / n, D_k the displacement of an h so far; so a push has what
        its step adds to n_k D_k.
        """
        own = self.own.get(slot)
        if own is None:
            return step
        before: Array = self.first - own.h
        return before + np.float32(1 + own.samples / samples) * step

    def _step_own(self, slot: int, step: Array, samples: int) -> None:
        if (own := self.own.get(slot)) is not None:
            own.h -= step
            own.samples += samples

    def figures(self) -> Json:
        return {"steps": self.steps, "repeated": self.repeated} if self.role == HEAD else {}


def check_tensor(elements: Array, shape: Array) -> None:
    """Raises RemoteProtocolError unless this is a tensor of a batch."""
    if shape.dtype != np.int64 or not 1 <= len(shape) <= 8 or (shape < 1).any():
        raise RemoteProtocolError("a tensor has no shape, or no samples")
    if elements.size != int(np.prod(shape.astype(object))):
        raise RemoteProtocolError(f"a tensor of {elements.size} elements has not {shape.tolist()}")


# ---------------------------------------------------------------- servers


class Once:
    """Which batches are in a shard: of each client's portions the last two, and how far they got.

    A portion that is given back is leased before all new ones, and a client has one at a time: so
    no older one comes again.
    """

    def __init__(self) -> None:
        self._newest: dict[int, list[tuple[int, int]]] = {}
        """Slot -> (clock of a portion, its newest batch), the newest portion last."""

    def is_new(self, push: messages.Push) -> bool:
        """Whether this batch is not in the shard; from now on it is."""
        number, slot = divmod(push.portion - 1, COUNT_MAX)
        known = [n for rows in self._newest.values() for clock, n in rows if clock == push.clock]
        newest = max(known, default=-1)
        rows = [row for row in self._newest.get(slot, []) if row[0] != push.clock]
        self._newest[slot] = [*rows[-1:], (push.clock, max(newest, number))]
        return number > newest

    def state(self) -> Json:
        rows = sorted(self._newest.items())
        return {"in": [[slot, *(n for row in of for n in row)] for slot, of in rows]}

    def resume(self, state: Json) -> None:
        self._newest = {
            slot: [(numbers[at], numbers[at + 1]) for at in range(0, len(numbers), 2)]
            for slot, *numbers in state.get("in", [])
        }


class InTurn(ShardSide):
    """Applies each batch at once, and once."""

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self.once = Once()

    @classmethod
    def of(cls, options: Options) -> type[ShardSide]:
        if options.clients == "turn":
            return cls
        return InRounds if options.heads == "each" else InParallel

    @classmethod
    def optimizer(cls, options: Options, optimizer: Optimizer, workers: int) -> Optimizer:
        return Gathered(optimizer) if options.heads == "each" else optimizer

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if not push.portion:
            return self.left_out(push, "it does not say which batch it is")
        return [applied(self, self.once, push, delta)]

    def state(self) -> Json:
        return {**self.once.state(), "cut": self.batches}

    def resume(self, state: Json) -> None:
        self.once.resume(state)

    def restore(self, state: Json) -> None:
        """A portion that is not done in the checkpoint is computed again."""
        if state.get("cut") == self.batches:
            self.once.resume(state)


class InParallel(barrier.Barrier):
    """A barrier for the clients' steps; the head's are applied at once, and once."""

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self.once = Once()

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if push.portion:
            return [applied(self, self.once, push, delta)]
        return super().push(push, delta)

    def state(self) -> Json:
        return {**super().state(), **self.once.state(), "cut": self.batches}

    def resume(self, state: Json) -> None:
        super().resume(state)
        self.once.resume(state)

    def restore(self, state: Json) -> None:
        if state.get("cut") == self.batches:
            self.once.resume(state)


class InRounds(InParallel):
    """The same, but the head's gradients are gathered, and the head says when a step is made."""

    def __init__(self, options: Any, shard: Shard) -> None:
        super().__init__(options, shard)
        self.round = 0
        """The newest step of the clients that the head has begun."""

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        if not push.portion:
            return super().push(push, delta)
        if not push.samples:
            return [self._fold(push)]
        if not self.once.is_new(push):
            return [push.outcome(LATE)]
        self.shard.apply(delta, push.samples, counters={TAKES: push.samples})
        return [push.outcome(BUFFERED)]

    def _fold(self, push: messages.Push) -> PushOutcome:
        is_next = push.portion == END or push.clock > self.round
        if push.portion != END:
            self.round = max(self.round, push.clock)
        if is_next and self.shard.optimizer.counters[GATHERED]:
            self.shard.apply(Delta(np.zeros(self.shard.size, np.float32)), 0, counters={FOLDS: 1})
        return push.outcome(APPLIED)

    def state(self) -> Json:
        return {**super().state(), "round": self.round}

    def resume(self, state: Json) -> None:
        super().resume(state)
        self.round = state["round"]

    def restore(self, state: Json) -> None:
        """The gradients of the step that was under way are still gathered: it is made once."""
        super().restore(state)
        self.round = state.get("round", 0)


def applied(side: ShardSide, once: Once, push: messages.Push, delta: Delta) -> PushOutcome:
    """Step with a batch, unless it is in the shard."""
    if not once.is_new(push):
        return push.outcome(LATE)
    _, client = divmod(push.portion - 1, COUNT_MAX)
    # The head reads h right before it computes, and nobody else pushes to its server.
    staleness = max(0, side.shard.version - push.base_version) if client == push.slot else 0
    side.shard.apply(delta, push.samples)
    return push.outcome(APPLIED, staleness)


# ---------------------------------------------------------------- the lead


class Turns(Lead):
    """A client has one portion at a time; if they take turns, one client has."""

    takes_turns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.last = -1
        """The client that had the newest turn."""

    def may_lease(self, slot: int, first_slot: int) -> str:
        if self.options.clients == "parallel":
            # One at a time: of more, the servers would not know which batches they have.
            return f"worker-{slot}, which has a portion" if slot in self.at_work else ""
        if not self.at_work:
            return ""
        names = ", ".join(f"worker-{each}" for each in sorted(self.at_work))
        return f"{names}, whose turn it is"

    def in_turn(self, slots: Iterable[int]) -> list[int]:
        return sorted(slots, key=lambda slot: (slot <= self.last, slot))

    def portion_done(self, slot: int, steps: int, samples: int, data_epoch: int) -> None:
        self.last = slot

    def state(self) -> Json:
        return {"last": self.last}

    def resume(self, state: Json) -> None:
        self.last = state.get("last", -1)


def check(job: JobFile) -> list[Fault]:
    found: list[Fault] = []
    size, options = job.workers.batch_size, job.algorithm.options
    if options.get("alpha") and size != "auto" and size < SAMPLES_MIN:
        what = f"a batch of {size} samples has no distance correlation, which alpha weighs"
        instead = f"use {SAMPLES_MIN} or more, or alpha = 0"
        found.append((("workers", "batch_size"), what, instead))
    in_turn = options.get("clients", "turn") == "turn"
    if options.get("heads", "one") == "each" and in_turn:
        what = "clients that take turns step one h, one after the other"
        found.append((("algorithm", "heads"), what, 'use clients = "parallel", or heads = "one"'))
    if options.get("local_steps", 1) > 1:
        found += _check_rounds(job, in_turn=in_turn)
    kind = registry.load("optimizers", job.optimizer.name)
    if options.get("heads", "one") == "each" and issubclass(kind, MatrixOptimizer):
        what = f"{job.optimizer.name} has no average of gradients that come one after the other"
        found.append((("optimizer", "name"), what, 'use another one, or heads = "one"'))
    return found


def _check_rounds(job: JobFile, *, in_turn: bool) -> Iterator[Fault]:
    if in_turn:
        what = "clients that take turns hand their layers on, and average nothing"
        yield ("algorithm", "local_steps"), what, 'use clients = "parallel", or 1'
    if schedule.is_needed(job.schedule):
        what = "the head steps too, and has no data by which it would know how long the run is"
        yield ("schedule",), what, "remove [schedule], or use local_steps = 1"
    is_plain = job.inner.name == "sgd" and not (
        job.inner.options.get("momentum") or job.inner.options.get("weight_decay")
    )
    if not is_plain:
        what = "client and head step alike, and the head has no state of an optimiser per client"
        yield ("inner", "name"), what, 'use "sgd" without momentum and weight_decay'


def variant(options: Options) -> dict[str, Choice]:
    """With rounds of several steps the servers average what these have come to."""
    if options.local_steps == 1:
        return {}
    return {
        "optimizer": Choice(name="sgd", options={"lr": 1.0}),
        "inner": Choice(name="sgd", options={"lr": 0.01}),
    }


SPLIT = Method(
    Options=Options,
    check=check,
    variant=variant,
    replica=Replica,
    shard=InTurn,
    lead=Turns,
    shape=Shape(
        links=frozenset({"peers"}),
        parts=(
            Part(
                role=CLIENT,
                tensors=("client.", "top."),
                asks=HEAD,
                task="daemons.worker.split.client:ClientParts",
            ),
            Part(
                role=HEAD,
                tensors=("head.",),
                has_data=False,
                task="daemons.worker.split.head:HeadParts",
                engine="daemons.worker.split.head:Head",
                twin="dlctl.algorithms.methods.split_twin:HeadTwin",
            ),
        ),
        serves_on=True,
        compressors=("none",),
    ),
)
