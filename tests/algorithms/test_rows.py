"""Tables of rows: what lies where, and that one worker with servers is a loop on one machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from builders import even
from oracles import Agree
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dlctl
from daemons.worker import inner_optimizer
from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.replica import TorchReplica
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import Task, TaskError
from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.algorithms.methods.rows import ROWS
from dlctl.compress.none import Dense
from dlctl.errors import DlctlError, RemoteProtocolError
from dlctl.job.config import Choice, Data, Job, JobFile, Servers, Workers
from dlctl.model.flat import Layout, TensorEntry
from dlctl.optim.sgd import SGD
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import Compute, Computed, ModelBuilt, NameRows, RowsNamed
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.server import Server
from dlctl.roles.worker.worker import Worker
from dlctl.shards.rows import RowSlice, RowTables
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Event, Received, Send, Started
from dlctl.wire.messages import Packed, Register

ENTRIES = (
    TensorEntry("a", "rows", (7, 3), "float32", init=("uniform", -1.0, 1.0)),
    TensorEntry("b", "rows", (4, 1), "float32", init=("constant", 2.0, 0.0)),
    TensorEntry("c", "rows", (50, 5), "float32", init=("normal", 1.0, 0.5)),
)
LAYOUT = Layout((TensorEntry("weight", "trained", (2,), "float32"), *ENTRIES))
SIZE = 7 * 3 + 4 + 50 * 5
COUNTS = pytest.mark.parametrize("servers", [1, 2, 3, 9])


def slices(servers: int, layout: Layout = LAYOUT) -> list[RowSlice]:
    return [RowSlice(RowTables(layout), servers, index) for index in range(servers)]


# ---------------------------------------------------------------- what lies where


@COUNTS
def test_rows_begin_as_the_seed_says_however_many_servers_there_are(servers: int) -> None:
    (whole,) = [each.initial(5) for each in slices(1)]
    parts = [each.initial(5) for each in slices(servers)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole.size == SIZE
    a, b, c = np.split(whole, (21, 25))
    assert np.abs(a).max() <= 1
    assert len(set(a.tolist())) == 21
    assert (b == 2).all()
    assert abs(c.mean() - 1) < 0.15
    assert 0.4 < c.std() < 0.6
    assert not np.array_equal(slices(1)[0].initial(6), whole)


@COUNTS
def test_no_row_is_on_two_servers_and_none_is_nowhere(servers: int) -> None:
    cuts = [(each.lo, each.hi) for each in slices(servers)]
    assert [lo for lo, _ in cuts] + [61] == [0] + [hi for _, hi in cuts]
    bounds = [RowTables(LAYOUT).bounds(servers, index) for index in range(servers)]
    assert [lo for lo, _ in bounds] + [SIZE] == [0] + [hi for _, hi in bounds]
    assert max(hi - lo for lo, hi in bounds) <= SIZE / servers + 5


@COUNTS
def test_rows_are_taken_and_pushed_by_their_numbers(servers: int) -> None:
    rng = np.random.default_rng(0)
    tables, whole = RowTables(LAYOUT), rng.standard_normal(SIZE).astype(np.float32)
    rows = np.sort(rng.permutation(61)[:20])
    where = np.concatenate(
        [np.arange(tables.element_of(row), tables.element_of(row + 1)) for row in rows.tolist()]
    )
    taken, pushed, values = [], whole.copy(), rng.standard_normal(where.size).astype(np.float32)
    at = 0
    for index, each in enumerate(slices(servers)):
        lo, hi = tables.bounds(servers, index)
        i, j = each.part(rows)
        numbers = (rows[i:j] - each.lo).astype(np.int32)
        taken.append(each.take(whole[lo:hi], numbers))
        count = tables.count(rows[i:j])
        delta = each.expand(Packed("rows", hi - lo, (numbers, values[at : at + count])))
        pushed[lo:hi][delta.indices] += delta.values
        at += count
    assert np.concatenate(taken).tolist() == whole[where].tolist()
    whole[where] += values
    assert pushed.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("numbers", "dtype", "count"),
    [([1, 0], "i4", 6), ([0, 0], "i4", 6), ([-1], "i4", 3), ([61], "i4", 5), ([0], "i8", 3),
     ([0], "i4", 4)],
)  # fmt: skip
def test_what_are_no_rows_is_refused(numbers: list[int], dtype: str, count: int) -> None:
    (rows,) = slices(1)
    arrays = np.array(numbers, dtype), np.zeros(count, np.float32)
    with pytest.raises(RemoteProtocolError):
        rows.expand(Packed("rows", SIZE, arrays))


def test_a_layout_has_tables_of_rows_or_says_what_is_wrong_with_them() -> None:
    assert Layout.from_bytes(LAYOUT.to_bytes()) == LAYOUT
    for wrong in ([], [["else", 0.0, 1.0]], [["normal", 0.0]], [["normal", 0.0, float("inf")]]):
        row = ["a", "rows", [7, 3], "float32", [], *wrong]
        with pytest.raises(RemoteProtocolError, match="rows"):
            Layout.from_bytes(json.dumps([row]).encode())


# ---------------------------------------------------------------- on workers and servers


class Words:
    """Pairs of words; each word has a row in two tables, of different widths."""

    vocabulary = 40
    scale = 1.0

    def tables(self) -> dict[str, tuple[int, int, Any]]:
        return {"in": (self.vocabulary, 3, ("normal", 0.0, 0.5)), "out": (self.vocabulary, 4, 0.1)}

    def dataset(self) -> TensorDataset:
        rng = torch.Generator().manual_seed(0)
        words = torch.randint(0, 20, (24,), generator=rng)
        return TensorDataset(words, torch.randint(0, 40, (24, 2), generator=rng))

    def rows(self, batch: Any) -> dict[str, Tensor]:
        words, others = batch
        return {"in": words, "out": others}

    def loss(self, model: nn.Module, batch: Any, rows: dict[str, Tensor]) -> Tensor:
        scores = (rows["in"][:, None] * rows["out"][..., :3]).sum(-1) + rows["out"][..., 3]
        return functional.softplus(-scores).sum(1).mean()


class WithModel(Words):
    def model(self) -> nn.Module:
        return nn.Linear(3, 3)

    def loss(self, model: nn.Module, batch: Any, rows: dict[str, Tensor]) -> Tensor:
        return super().loss(model, batch, {**rows, "in": model(rows["in"])})


class Changing(Words):
    """The same steps, made by the task itself."""

    loss = None

    def change(
        self, model: nn.Module, batch: Any, rows: dict[str, Tensor], lr: float
    ) -> tuple[float, dict[str, Tensor]]:
        with torch.enable_grad():
            leaves = {name: each.requires_grad_() for name, each in rows.items()}
            loss = Words.loss(self, model, batch, leaves)
            loss.backward()
        changes = {name: -lr * len(batch[0]) * each.grad for name, each in leaves.items()}
        return float(loss), changes


RATE, SERVERS_RATE = 0.2, 0.05


@dataclass
class Run:
    """One worker and some servers, which are the real machines; here are their daemons."""

    user: Any
    servers: int = 2
    steps: int = 1
    batch_size: int = 4
    bytes: Counter[str] = field(default_factory=Counter)
    late: list[tuple[int, m.Ack]] = field(default_factory=list)
    """Acks of pushes to the tables of rows, while `holds`."""
    holds: bool = False
    done: list[m.PortionDone] = field(default_factory=list)
    failed: str = ""

    def __post_init__(self) -> None:
        job = JobFile(
            job=Job(name="rows", task="train.py:task", seed=3),
            algorithm=Choice(name="rows", options={"steps": self.steps, "overlap": False}),
            inner=Choice(name="sgd", options={"lr": RATE}),
            optimizer=Choice(name="sgd", options={"lr": SERVERS_RATE}),
            servers=Servers(count=self.servers),
            data=Data(shuffle=False, lease_ahead_s=0.0),
        )
        self.replica = TorchReplica(Task(self.user), device="cpu", seed=3)
        self.stepper = Stepper(
            self.replica, job.gradient, inner_optimizer.make(job.inner, self.replica.values)
        )
        dataset = self.replica.task.dataset()
        self.samples = len(dataset)
        self.loader = PortionLoader(
            dataset, batch_size=self.batch_size, seed=3, shuffle=False, processes=0
        )
        registration = Register("run", "worker", "worker-0", 1, 1, "here", dlctl.__version__)
        self.worker = Worker(registration, job, ROWS, Dense(Dense.Options()))
        self.machines = [self._server(job, index) for index in range(self.servers)]
        self.events: list[Event] = [
            Started(),
            Received(COORDINATOR, m.Welcome("worker-0", 0, 1, sign(b"key", "run", 0, 1), {})),
            ModelBuilt(
                m.ModelReady("", self.replica.layout.to_bytes(), self.samples),
                self.replica.parameters, self.replica.averaged(),
            ),
            Received(
                COORDINATOR,
                m.Topology(
                    ("a",) * self.servers, ("",) * self.servers,
                    even(self.replica.layout.size(), self.servers), True, "",
                    batch_size=self.batch_size,
                ),
            ),
        ]  # fmt: skip
        self.advance()

    def _server(self, job: JobFile, index: int) -> Server:
        name, layout = f"server-{index}", self.replica.layout
        registration = Register("run", "server", name, 1, 1, "here", dlctl.__version__)
        server = Server(registration, job, "ipc://x", ROWS, SGD, Dense)
        bounds = even(layout.size(), self.servers)
        for event in (
            Started(),
            Received(COORDINATOR, m.Welcome(name, index, 1, b"key", {})),
            Received(COORDINATOR, m.Assign(bounds, layout.to_bytes(), restore="", step_samples=64)),
        ):
            server.handle(event, 0.0)
        return server

    def epoch(self, number: int = 0) -> None:
        """Lease all of it, as one portion."""
        training = self.worker.training
        assert training is not None
        request = training.steps.leasing.number
        self.events.append(Received(COORDINATOR, m.Lease(request, number, number, 0, self.samples)))
        self.advance()

    def advance(self) -> None:
        while self.events:
            for effect in self.worker.handle(self.events.pop(0), 0.0):
                self.events += self._performed(effect)

    def _performed(self, effect: object) -> Iterator[Event]:
        match effect:
            case NameRows():
                place = (effect.data_epoch, effect.start, effect.stop)
                numbers = range(effect.number, effect.number + effect.count)
                self.ahead = [self.loader.step(*place, number).batches for number in numbers]
                named = self.replica.rows.name([[b for b, _ in each] for each in self.ahead])
                yield RowsNamed(named)
            case Compute():
                yield self._computed(effect)
            case Send(_, m.Failed() as failed):
                self.failed = failed.error
            case Send(peer, m.PortionDone() as done):
                self.done.append(done)
            case Send(str() as peer, message) if peer != COORDINATOR:
                yield from self._answers(int(peer.removeprefix("server-")), message)

    def _computed(self, effect: Compute) -> Computed:
        rows, losses = self.replica.rows, []
        rows.begin(effect.rows)
        for batches in self.ahead[: effect.count]:
            step = self.stepper.step(
                batches, own_lr=effect.own_lr, gather=effect.gather, samples=self.batch_size
            )
            losses.append(step.loss)
        return Computed(
            losses[-1], step.gradient, self.replica.averaged(), step.norm, True, tuple(losses[:-1]),
            rows=rows.changes(),
        )  # fmt: skip

    def _answers(self, index: int, message: m.Message) -> Iterator[Event]:
        frames = [bytes(frame) for frame in codec.encode(message)]
        self.bytes[type(message).__name__] += sum(map(len, frames))
        for effect in self.machines[index].handle(Received(b"worker-0", codec.decode(frames)), 0.0):
            if not isinstance(effect, Send) or effect.peer == COORDINATOR:
                continue
            answer = effect.message
            self.bytes[type(answer).__name__] += sum(map(len, codec.encode(answer)))
            if isinstance(answer, m.Ack) and answer.table and self.holds:
                self.late.append((index, answer))
            else:
                yield Received(f"server-{index}", answer)

    def release(self) -> None:
        """Hear of what was held."""
        self.holds = False
        self.events += [Received(f"server-{index}", ack) for index, ack in self.late]
        self.advance()

    def tables(self) -> dict[str, np.ndarray]:
        """As the servers have them."""
        parts = [machine.serving.tables[1].shard.w for machine in self.machines]
        return tables_in(np.concatenate(parts), self.replica.layout)

    def weights(self) -> np.ndarray:
        return np.concatenate([machine.serving.shard.w for machine in self.machines])


def tables_in(vector: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    return {e.name: vector[lo:hi].reshape(e.shape) for e, lo, hi in layout.slices("rows")}


def loop(user: Words, epochs: int, batch_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """On one machine: dense tables, each batch a step of plain SGD along the gradient of its sum;
    for other parameters along that of its mean, with the rate of the servers.
    """
    replica = TorchReplica(Task(user), device="cpu", seed=3)
    first = RowSlice(RowTables(replica.layout), 1, 0).initial(3)
    tables = {
        name: torch.from_numpy(values.copy()).requires_grad_()
        for name, values in tables_in(first, replica.layout).items()
    }
    model, data = replica.model, user.dataset()
    for _ in range(epochs):
        for at in range(0, len(data), batch_size):
            batch = list(data[at : at + batch_size])
            rows = {name: tables[name][where] for name, where in user.rows(batch).items()}
            loss = (type(user).loss or Words.loss)(user, model, batch, rows)
            loss.backward()
            with torch.no_grad():
                for table in tables.values():
                    table -= RATE * batch_size * table.grad
                    table.grad = None
                for parameter in model.parameters():
                    parameter -= SERVERS_RATE * parameter.grad
                    parameter.grad = None
    weights = [each.detach().reshape(-1) for each in model.parameters()]
    return {name: t.detach() for name, t in tables.items()}, torch.cat([torch.empty(0), *weights])


@pytest.mark.oracle("rows", "the same loop over whole tables in torch, on one machine")
@pytest.mark.parametrize(("kind", "steps"), [(Words, 1), (Words, 4), (WithModel, 1), (Changing, 1)])
@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_is_a_loop_on_one_machine(
    agree: Agree, kind: type[Words], steps: int, servers: int
) -> None:
    run = Run(kind(), servers, steps)
    for epoch in range(3):
        run.epoch(epoch)
    tables, weights = loop(kind(), 3, run.batch_size)
    for name, table in run.tables().items():
        agree(table, tables[name].numpy(), atol=2e-6)
    assert np.allclose(run.weights(), weights.numpy(), atol=2e-6)
    assert [each.steps for each in run.done] == [6, 6, 6]


def test_what_travels_goes_by_the_rows_of_a_batch_and_not_by_the_vocabulary() -> None:
    few, many = Words(), Words()
    many.vocabulary = 4_000
    found = []
    for user in (few, many):
        run = Run(user)
        run.epoch()
        assert {"FetchRows", "Parameters", "Push"} <= run.bytes.keys()
        found.append(sum(run.bytes[kind] for kind in ("FetchRows", "Parameters", "Push")))
    assert found[1] < 1.3 * found[0]  # Numbers have a few digits more.


def test_a_step_is_done_when_its_rows_are_settled_too() -> None:
    run = Run(Words(), batch_size=24)
    run.holds = True
    run.epoch()
    assert len(run.late) == 2, "of each server"
    assert not run.done
    run.release()
    assert [each.samples for each in run.done] == [24]


def test_a_push_of_rows_that_comes_again_is_added_once() -> None:
    run = Run(Words(), servers=1)
    serving = run.machines[0].serving
    before = serving.tables[1].shard.w.copy()
    numbers, values = np.array([0, 45], np.int32), np.ones(7, np.float32)
    push = m.Push(
        0, 1, 1, 0, 0, 0, 0, 1, 0, Packed("rows", before.size, (numbers, values)), table=1
    )
    for outcome in (m.APPLIED, m.DUPLICATE):
        (answer,) = run._answers(0, push)
        assert answer.message.outcome == outcome
    changed = serving.tables[1].shard.w - before
    assert changed.sum() == pytest.approx(7, abs=1e-4)
    assert np.flatnonzero(changed).tolist() == [0, 1, 2, *range(120 + 20, 120 + 24)]


def test_several_steps_at_once_are_for_rows_alone() -> None:
    run = Run(WithModel(), steps=2)
    assert run.failed.startswith("algorithm.steps")


# ---------------------------------------------------------------- what a task may get wrong


@pytest.mark.parametrize(
    ("tables", "rows", "what"),
    [
        ({"in": (0, 3, 0.0)}, None, r'tables\(\)\["in"\] is \(0, 3, 0.0\)'),
        ({"in": (5, 3, ("gauss", 0, 1))}, None, "gauss"),
        ({"in": (5, 3)}, None, "is \\(5, 3\\)"),
        ({"in": (5, 3, 0.0)}, {"out": torch.tensor([1])}, 'a table "out"; the tables are in'),
        ({"in": (5, 3, 0.0)}, {"in": torch.tensor([1.0])}, "no int64 tensor"),
        ({"in": (5, 3, 0.0)}, {"in": torch.tensor([1, 5])}, "rows 1 to 5 of 5"),
    ],
)
def test_a_task_is_told_what_is_wrong_with_its_rows(tables: Any, rows: Any, what: str) -> None:
    user = Words()
    user.tables = lambda: tables  # type: ignore[method-assign]
    user.rows = lambda batch: rows  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=what):
        TorchReplica(Task(user), device="cpu", seed=0).rows.name([[None]])


def test_other_methods_say_that_they_train_no_rows() -> None:
    with pytest.raises(DlctlError, match="tables"):
        DOWNPOUR.shape.check_sizes(LAYOUT)
    ROWS.shape.check_sizes(Layout(ENTRIES))


def test_a_job_file_is_told_what_rows_cannot_do() -> None:
    job = JobFile(
        job=Job(name="rows", task="train.py:task"),
        algorithm=Choice(name="rows"),
        inner=Choice(name="none"),
        workers=Workers(batch_size="auto"),
    )
    assert [path for path, _, _ in ROWS.check(job)] == [
        ("inner", "name"),
        ("workers", "batch_size"),
    ]
