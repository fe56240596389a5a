"""The clients of a task's dataset, and the steps of one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import Agree
from torch import nn
from torch.utils.data import TensorDataset

from daemons.worker import inner_optimizer
from daemons.worker.data.federated_clients import clients_of, dataset_of
from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.replica import TorchReplica
from daemons.worker.stepper import Stepper
from daemons.worker.task.user_task import Task, TaskError
from dlctl.algorithms.needs import Pull
from dlctl.job.config import Choice, Data, Job, JobFile

SAMPLES = 30
LABELS = torch.arange(SAMPLES) % 3


class Named(list[tuple[float, str]]):
    """Samples whose labels are beside them."""

    targets = LABELS.tolist()


def task_of(**parts: Any) -> Task:
    return Task(SimpleNamespace(model=nn.Module, dataset=list, loss=lambda *_: None, **parts))


def cut(dataset: Any, partition: str = "shards", count: int = 3, **parts: Any) -> Any:
    data = Data(clients=count, partition=partition)  # type: ignore[arg-type]
    job = JobFile(job=Job(name="a", task="train.py:task", seed=4), data=data)
    return clients_of(job, task_of(**parts), dataset)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.zeros(SAMPLES, 2), LABELS),
        Named((0.0, "a") for _ in range(SAMPLES)),
        [(0.0, int(label)) for label in LABELS],
    ],
    ids=["tensors", "targets", "samples"],
)
def test_labels_are_found(dataset: Any) -> None:
    found = cut(dataset)
    assert sorted(found.sizes) == [10, 10, 10]
    for part in found.parts:
        assert len(np.unique(LABELS.numpy()[part])) <= 2


def test_a_task_may_say_whose_its_samples_are() -> None:
    found = cut(range(SAMPLES), "task", clients=lambda dataset: [2, 0, 1] * 10)
    assert found.parts[2].tolist() == list(range(0, SAMPLES, 3))
    assert found.digest != cut(range(SAMPLES), "task", clients=lambda _: [0, 1, 2] * 10).digest


@pytest.mark.parametrize(
    ("clients", "told"),
    [
        (lambda _: [0, 1, 3] * 10, "returned the number 3; data.clients is 3"),
        (lambda _: [0, 2] * 15, "client 1 of 3 without a sample"),
        (lambda _: [0, 1, 2], "one whole number for each sample"),
        (None, "the task has no clients"),
    ],
)
def test_what_a_task_says_is_checked(clients: Any, told: str) -> None:
    with pytest.raises(TaskError) as error:
        cut(range(SAMPLES), "task", **({"clients": clients} if clients else {}))
    assert told in f"{error.value.message} {error.value.hint}"


def test_a_dataset_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(TaskError, match=r"31.*30"):
        cut([(0.0, 1)] * SAMPLES, "iid", count=31)
    with pytest.raises(TaskError, match="order"):
        cut(range(SAMPLES), "iid", sampler=lambda dataset, epoch: [0])
    with pytest.raises(TaskError, match=r"label.* 30 "):
        cut(TensorDataset(torch.zeros(SAMPLES, 2)))


def test_a_portion_is_a_client_s_samples() -> None:
    owners = np.arange(SAMPLES) % 3
    found = cut(range(SAMPLES), "task", clients=lambda _: owners)
    data = PortionLoader(
        range(SAMPLES), batch_size=4, seed=4, shuffle=True, processes=0, clients=found
    )
    for client in (1, 2, 1):
        batches = [data.step(5, 0, 20, number, client).batches for number in range(5)]
        rows = np.concatenate([batch.numpy() for ((batch, _),) in batches])
        assert np.array_equal(rows, found.rows(5, client, 0, 20))
        assert set(owners[rows]) == {client}


@pytest.mark.oracle("fedavg", "torch.optim.SGD on the loss of FedProx")
def test_a_client_is_pulled_back_and_its_optimiser_begins_anew(agree: Agree) -> None:
    """As torch does it: FedProx, and momentum that does not go from one client to the next."""
    model, lr, mu = nn.Linear(3, 1), 0.1, 0.7
    task = SimpleNamespace(
        model=lambda: nn.Linear(3, 1), dataset=list,
        loss=lambda model, batch: model(batch).square().mean(),
    )  # fmt: skip
    replica = TorchReplica(Task(task), device="cpu", seed=0)
    torch.nn.utils.vector_to_parameters(
        torch.from_numpy(replica.parameters.copy()), model.parameters()
    )
    base = replica.parameters.copy()
    momentum = {"lr": lr, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0}
    stepper = Stepper(
        replica, None, inner_optimizer.make(Choice(name="sgd", options=momentum), replica.values)
    )
    batches = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
    for client in (batches[:2], batches[2:]):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(base.copy()), model.parameters())
        aims = [p.detach().clone() for p in model.parameters()]
        replica.parameters[:] = base
        for number, batch in enumerate(client):
            optimizer.zero_grad()
            near = sum(
                (p - aim).square().sum() for p, aim in zip(model.parameters(), aims, strict=True)
            )
            (model(batch).square().mean() + mu / 2 * near).backward()
            optimizer.step()
            stepper.step(
                [(batch, 1.0)], own_lr=lr, gather=False, pull=Pull(mu, base), fresh=not number
            )
            expected = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
            agree(replica.parameters, expected, atol=1e-6)


def test_of_clients_that_stay_where_they_are_only_those_are_made_that_are_used() -> None:
    sizes, made = [4, 6, 5], []

    def dataset(client: int) -> range:
        made.append(client)
        return range(100 * client, 100 * client + sizes[client] + (client == 2))

    parts = {"dataset": dataset, "client_sizes": lambda: sizes}
    task = Task(SimpleNamespace(model=nn.Module, loss=lambda *_: None, **parts))
    job = JobFile(
        job=Job(name="a", task="train.py:task"), data=Data(clients=3, partition="workers")
    )
    whole = dataset_of(job, task)
    found = clients_of(job, task, whole)
    assert (found.sizes, len(whole)) == ((4, 6, 5), 15)
    data = PortionLoader(whole, batch_size=9, seed=0, shuffle=True, processes=0, clients=found)
    ((batch, _),) = data.step(0, 0, 6, 0, 1).batches
    assert sorted(batch.tolist()) == [100, 101, 102, 103, 104, 105]
    assert made == [1]
    with pytest.raises(
        TaskError, match=r"dataset\(2\) has 6 samples, but client_sizes\(\) returned 5"
    ):
        data.step(0, 0, 5, 0, 2)
    sizes[0] = 0
    with pytest.raises(TaskError, match=r"client_sizes.*3 "):
        dataset_of(job, task)
