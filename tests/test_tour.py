"""The way of one gradient through all layers, in reading order. Read this test first.

`dlctl/__init__.py` lists the files that it comes through.
"""

import numpy as np
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from daemons.worker.replica import Replica
from daemons.worker.task import Task
from dlctl import wire
from dlctl.algorithms import downpour
from dlctl.algorithms.base import Data, Fetch, NextData, NextGradient, Push, Step
from dlctl.compress.topk import TopK, TopKOptions
from dlctl.config import Choice, Job, JobFile
from dlctl.flat import slice_bounds
from dlctl.machine import Received, Started
from dlctl.messages import APPLIED, Assign, Initialise, Message, Welcome
from dlctl.optim.adagrad import Adagrad
from dlctl.roles.protocol.context import COORDINATOR, Birth
from dlctl.roles.protocol.retry import Retries
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.server import Server
from dlctl.roles.worker.shard_client import Identity, ShardClient

KEY = b"the key of this run"
JOB = JobFile(
    job=Job(name="tour", task="train.py:task"),
    optimizer=Choice(name="adagrad", options={"lr": 0.1}),
    compression=Choice(name="topk", options={"density": 0.4, "dense_below": 0}),
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


def over_the_wire(message: Message) -> Message:
    return wire.decode([bytes(frame) for frame in wire.encode(message)])


def test_one_gradient_goes_from_the_loss_to_a_server_and_comes_back_as_parameters():
    # The model is one flat float32 vector, and so is the gradient of a batch.
    replica = Replica(Task(Halves()), device="cpu", seed=0)
    batch = default_collate(replica.task.dataset())
    loss, gradient = replica.gradient(batch)
    assert gradient.shape == replica.parameters.shape == (6,)

    # Two servers own one half of it each. We follow the first half; its server has been told so.
    lo, hi = slice_bounds(replica.layout.size(), parts=2, index=0)
    birth = Birth("tour-1", "server", "server-0", 1, pid=1, host="here", version="0")
    server = Server(birth, JOB, "ipc://server-0", downpour.DOWNPOUR, Adagrad, TopK)
    server.handle(Started(), now=0.0)
    for message in (
        Welcome("server-0", index=0, term=1, token=KEY, settings={}),
        Assign(lo, hi, replica.layout.to_bytes(), restore=""),
    ):
        server.handle(Received(COORDINATOR, over_the_wire(message)), now=0.0)

    def ask(message: Message) -> Message:
        answer = server.handle(Received(b"the worker", over_the_wire(message)), now=0.0)[0]
        return over_the_wire(answer.message)

    # A worker joins with the epoch that the coordinator gave it, and brings the initial values.
    me = Identity("tour-1", slot=0, epoch=1, token=sign(KEY, "tour-1", 0, 1))
    channel = ShardClient(0, me, Retries(resend_s=1.0))
    w, averaged, constant = replica.parameters[lo:hi].copy(), replica.averaged(), replica.constant()
    ask(channel.join(now=0.0).message)
    channel.on_joined(ask(Initialise(me.slot, me.epoch, w, averaged, constant)), now=0.0)

    # Downpour accrues the gradient, makes a step of its own with it, and asks for a push.
    side = downpour.Replica(downpour.Options(local_lr=0.5), replica.parameters, slot=0)
    method = side.run()
    assert next(method) == NextData()
    assert method.send(Data(data_epoch=0, portion=0, is_last=True)) == Fetch(wait=False)
    assert method.send(0) == NextGradient()
    assert method.send(Step(gradient, 5, loss)) == Push(side.residual, 5)
    assert np.array_equal(replica.parameters[lo:hi], w - np.float32(0.5) * gradient[lo:hi])

    # Of the accrued slice top-k takes the largest element; the others stay for a later push.
    largest = np.argmax(np.abs(gradient[lo:hi]))
    delta = TopK(TopKOptions(density=0.4, dense_below=0)).take(side.residual[lo:hi])
    assert np.flatnonzero(side.residual[lo:hi] == 0) == [largest]

    # It gets the next number, travels as a small header and raw buffers, and is applied once.
    push = channel.push(first_step=0, last_step=0, samples=5, clock=0, delta=delta)
    assert ask(push).outcome == APPLIED
    assert ask(push).outcome == "duplicate"

    # What the server has now takes the place of the worker's slice: it is in the model again.
    # (The first step of Adagrad is as long as its rate, whatever the gradient.)
    parameters = ask(channel.fetch(request=1, clock_min=0, whole=True))
    replica.parameters[lo:hi] = parameters.values
    expected = w.copy()
    expected[largest] -= 0.1 * np.sign(gradient[largest])
    assert np.allclose(replica.model.weight.detach().numpy()[0, lo:hi], expected, atol=1e-6)
