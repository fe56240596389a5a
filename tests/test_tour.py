"""The way of one gradient through all layers, in reading order. Read this test first.

`dlctl/__init__.py` lists the files that it comes through, in this order:

    compute -> worker -> training -> method -> compressor -> shard client -> wire
            -> server -> dedup -> method -> shard -> rule -> commit -> ack, and back as parameters

The `Worker` and the `Server` are the real machines. What a daemon would do for them, with sockets
and threads, is done here by hand: it takes a few lines.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

import dlctl
from daemons.worker import inner_optimizer
from daemons.worker.replica import TorchReplica
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import Task
from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.compress.topk import TopK
from dlctl.job.config import Choice, Job, JobFile
from dlctl.optim.adagrad import Adagrad
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import BuildModel, Compute, Computed, ModelBuilt
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.server import Server
from dlctl.roles.worker.worker import Worker
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Received, Send, Started
from dlctl.wire.messages import Register

RUN, KEY = "tour-1", b"the key of this run"
RATE, LOCAL_RATE = 0.1, 0.5
OPTIONS = {"density": 0.2, "dense_below": 0}
JOB = JobFile(
    job=Job(name="tour", task="train.py:task"),
    algorithm=Choice(name="downpour", options={"overlap": False}),
    inner=Choice(name="sgd", options={"lr": LOCAL_RATE}),
    optimizer=Choice(name="adagrad", options={"lr": RATE}),
    compression=Choice(name="topk", options=OPTIONS),
)


class Halves:
    """A task as a user writes it: learn to halve the sum of five numbers."""

    def model(self) -> nn.Module:
        return nn.Linear(5, 1)

    def dataset(self) -> list[tuple[Tensor, Tensor]]:
        return [(x, x.sum(-1, keepdim=True) / 2) for x in nn.init.eye_(Tensor(5, 5))]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.mse_loss(model(x), y)


def registration(role: str, name: str) -> Register:
    return Register(RUN, role, name, 1, pid=1, host="here", version=dlctl.__version__)


def over_the_wire(message: m.Message) -> m.Message:
    return codec.decode([bytes(frame) for frame in codec.encode(message)])


def sent(effects: list[Effect], kind: type[m.Message]) -> m.Message:
    """The one message of a kind among some effects, as its receiver gets it."""
    (found,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]
    return over_the_wire(found)


def test_one_gradient_goes_from_the_loss_to_a_server_and_comes_back_as_parameters() -> None:
    # The model is one flat float32 vector.
    replica = TorchReplica(Task(Halves()), device="cpu", seed=0)
    batch, layout = default_collate(replica.task.dataset()), replica.layout.to_bytes()
    size = replica.layout.size()
    me, it = registration("worker", "worker-0"), registration("server", "server-0")
    worker = Worker(me, JOB, DOWNPOUR, TopK(TopK.Options(**OPTIONS)))
    server = Server(it, JOB, "ipc://server-0", DOWNPOUR, Adagrad, TopK)

    def to_worker(event: object, peer: str = COORDINATOR) -> list[Effect]:
        event = Received(peer, over_the_wire(event)) if isinstance(event, m.Message) else event
        return worker.handle(event, now=0.0)

    def to_server(message: m.Message, peer: str | bytes = b"worker-0") -> list[Effect]:
        return server.handle(Received(peer, over_the_wire(message)), now=0.0)

    # The coordinator tells the server its slice, the worker its term and where the server is.
    server.handle(Started(), now=0.0)
    to_server(m.Welcome("server-0", 0, 1, KEY, {}), COORDINATOR)
    to_server(m.Assign((0, size), layout, restore="", step_samples=64), COORDINATOR)
    to_worker(Started())
    effects = to_worker(m.Welcome("worker-0", 0, 1, sign(KEY, RUN, 0, 1), {}))
    assert BuildModel(0, 1) in effects
    built = ModelBuilt(m.ModelReady("", layout, 5), replica.parameters, replica.averaged())
    assert sent(to_worker(built), m.ModelReady)
    effects = to_worker(m.Topology(("ipc://server-0",), ("",), (0, size), True, ""))

    # The worker joins the server and brings the initial values; then its method asks for data.
    joined = sent(to_server(sent(effects, m.Join)), m.Joined)
    initialise = sent(to_worker(joined, "server-0"), m.Initialise)
    effects = to_worker(sent(to_server(initialise), m.Joined), "server-0")
    assert worker.training is not None
    assert worker.training.phase().what == "waiting for data"

    # With data it reads the parameters first, and then computes.
    first = sent(effects, m.LeaseRequest).request
    effects = to_worker(m.Lease(first, portion=0, data_epoch=0, start=0, stop=5))
    effects = to_worker(sent(to_server(sent(effects, m.Fetch)), m.Parameters), "server-0")
    (compute,) = [effect for effect in effects if isinstance(effect, Compute)]

    # Its gradient is a flat float32 vector, too: the replica's own optimiser makes a step along it.
    w = replica.parameters.copy()
    inner = inner_optimizer.make(JOB.inner, replica.values)
    step = Stepper(replica, inner=inner).step([(batch, 1.0)], own_lr=compute.own_lr)
    gradient_then = step.gradient.copy()
    computed = Computed(step.loss, step.gradient, replica.averaged(), step.norm, step.is_usable)

    # Downpour accrues it; top-k pushes the largest element, the others stay.
    effects = to_worker(computed)
    assert np.allclose(replica.parameters, w - np.float32(LOCAL_RATE) * gradient_then)
    largest = int(np.argmax(np.abs(gradient_then)))
    assert np.flatnonzero(worker.training.side.residual == 0).tolist() == [largest]

    # It has the next number, and travels as a small header and raw buffers.
    push = sent(effects, m.Push)
    assert (push.slot, push.term, push.seq, push.samples) == (0, 1, 0, 5)

    # The server takes each number once: the rule goes over the shard, it is committed, then acked.
    ack = sent(to_server(push), m.Ack)
    assert (ack.outcome, ack.version) == (m.APPLIED, 1)
    assert sent(to_server(push), m.Ack).outcome == m.DUPLICATE
    assert sent(to_worker(ack, "server-0"), m.PortionDone).steps == 1

    # The next read brings it into the model. (Adagrad's first step is as long as its rate.)
    expected = w.copy()
    expected[largest] -= RATE * np.sign(gradient_then[largest])
    effects = to_worker(m.Lease(first + 1, portion=0, data_epoch=1, start=0, stop=5))
    (answer,) = [e.message for e in to_server(sent(effects, m.Fetch)) if isinstance(e, Send)]
    to_worker(answer, "server-0")
    assert np.allclose(replica.parameters, expected, atol=1e-6)


def test_the_reading_order_names_the_files_that_there_are() -> None:
    root = Path(dlctl.__file__).parents[1]
    steps = re.findall(r"^ ?\d+\. (.+)$", dlctl.__doc__ or "", flags=re.MULTILINE)
    named = [re.findall(r"`([\w/]+\.py)`", step) for step in steps]
    assert all(named), "each step names its file"
    assert [name for names in named for name in names if not (root / name).is_file()] == []
    order = ("compute", "worker/worker", "training", "downpour", "topk", "shard_client", "wire",
             "server/server", "dedup", "downpour", "shards/base", "adagrad", "mapped")  # fmt: skip
    behind = iter(named)
    for stop in order:
        assert any(any(stop in name for name in names) for names in behind), (
            f"{stop} is out of order"
        )
