"""Split learning on real daemons: as one process learns, whoever dies; and what each party sees."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from split_parties import BATCHES, RECORDING, exported, has, loaded, received, write
from torch import nn
from torch.nn import functional
from workplace import Workplace

from daemons.worker.replica import seed_all


def in_one_process(place: Workplace, *, is_u: bool) -> dict[str, np.ndarray]:
    """Plain SGD with momentum on the same batches, of one model: name -> value."""
    clinic, lab = (loaded(place.path / name / "train.py") for name in ("clinic", "lab"))
    seed_all(0)
    parts = {"client": clinic.task.client_model()}
    parts |= {"top": clinic.task.top_model()} if is_u else {}
    seed_all(0)
    parts["head"] = lab.task.server_model()
    model = nn.ModuleDict(parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for x, y in zip(clinic.X.split(8), clinic.Y.split(8), strict=True):
            output = model["head"](model["client"](x))
            output = model["top"](output) if is_u else output
            optimizer.zero_grad()
            functional.cross_entropy(output, y).backward()
            optimizer.step()
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


NORM = "nn.BatchNorm1d(12), "
"""Its statistics are handed on from client to client."""


def flat(state: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([state[name].reshape(-1) for name in sorted(state)])


def states(place: Workplace) -> list[dict[str, Any]]:
    """Of each server, in the last checkpoint."""
    newest = max((place.directory / "ckpt").glob("*/manifest.json"))
    return [shard["state"] for shard in json.loads(newest.read_text())["shards"]]


def versions(place: Workplace) -> list[int]:
    """Steps that each server has made."""
    return [state["version"] for state in states(place)]


def samples(place: Workplace) -> list[int]:
    """Samples in the values of each server."""
    return [state["samples"] for state in states(place)]


def kill(place: Workplace, *names: str) -> None:
    for name in names:
        pid = place.run()["pid"] if name == "coordinator" else place.pid(name)
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.oracle("split", "one process, plain torch, and kills of a client and the coordinator")
@pytest.mark.parametrize(("shape", "norm"), [("vanilla", NORM), ("vanilla", ""), ("u", NORM)])
def test_clients_in_turn_learn_what_one_process_does_although_they_are_killed(
    place: Workplace, shape: str, norm: str, agree
) -> None:
    write(place, f'shape = "{shape}"', pause_s=0.02, norm=norm)
    run = place.begin("run", "job.toml")
    place.until_step(4)
    kill(place, "worker-0", "coordinator")
    place.until_step(30)
    kill(place, "worker-1")
    ended = run.end()
    assert place.run()["state"] == "finished", ended.err
    assert versions(place) == [BATCHES, BATCHES]
    expected = in_one_process(place, is_u=shape == "u")
    found = exported(place)
    assert found.keys() == expected.keys()
    counts = [name for name in found if name.endswith("num_batches_tracked")]
    assert [found[name] for name in counts] == [BATCHES] * len(counts)
    assert len(counts) == bool(norm)
    agree(flat(found), flat(expected), atol=1e-6, rtol=1e-6 if norm else 0.0)
    assert place.run()["evaluation"]["accuracy"] > 0.5
    place.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ['shape = "vanilla"', 'shape = "u"'])
def test_no_batch_is_lost_or_twice_in_either_part_when_the_head_or_a_server_is_killed(
    place: Workplace, algorithm: str
) -> None:
    write(place, algorithm, pause_s=0.02)
    run = place.begin("run", "job.toml")
    victims = {4: "worker-2", 16: "server-1", 28: "server-0", 40: "worker-2"}
    for step, victim in victims.items():
        place.until_step(step)
        kill(place, victim)
    ended = run.end(120)
    assert place.run()["state"] == "finished", ended.err
    assert versions(place) == [BATCHES, BATCHES]
    place.nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("heads", ["one", "each"])
@pytest.mark.parametrize("local_steps", [1, 2])
def test_parallel_clients_train_although_one_and_the_head_are_killed(
    place: Workplace, heads: str, local_steps: int
) -> None:
    options = f'clients = "parallel"\nheads = "{heads}"\nlocal_steps = {local_steps}'
    write(place, options, pause_s=0.02)
    if local_steps > 1:
        path = place.path / "job.toml"
        averaged = '[inner]\nname = "sgd"\nlr = 0.3\n[workers]'
        text = path.read_text().replace('[optimizer]\nname = "momentum"\nlr = 0.05\n', "")
        path.write_text(text.replace("[workers]", averaged))
    run = place.begin("run", "job.toml")
    place.until_step(8)
    kill(place, "worker-0")
    place.until_step(24)
    kill(place, "worker-2")
    ended = run.end(120)
    assert place.run()["state"] == "finished", ended.err
    _, of_head = samples(place)
    assert of_head == 8 * BATCHES, "a batch that a dead client had asked for is in h once"
    assert place.run()["evaluation"]["accuracy"] > (0.35 if local_steps == 1 else 0.45)
    place.nothing_left()


FINISH = """
    def finish(self, model, metrics):
        here = Path(__file__).parent
        (here / "finishes").touch()
        while not (here / "go_on").exists():
            threading.Event().wait(0.05)
        return f"{model(X[:64]).argmax(1)}"


task = Clinic()
"""
"""It asks the head once the test has killed that."""


@pytest.mark.long
def test_a_head_that_dies_behind_the_last_checkpoint_is_named_and_holds_nothing(
    place: Workplace,
) -> None:
    write(place, 'shape = "vanilla"')
    clinic = place.path / "clinic"
    text = (clinic / "train.py").read_text()
    (clinic / "train.py").write_text(text.replace("\n\ntask = Clinic()\n", FINISH))
    run = place.begin("run", "job.toml")
    place.until("the client finishes", (clinic / "finishes").exists)
    kill(place, "worker-2")
    (clinic / "go_on").touch()
    ended = run.end(30)  # finish_s is 60.
    assert ended.code == 0, ended.err
    error = place.run()["finish"]["error"]
    assert error.startswith("worker-2, which it asks, is gone (killed by SIGKILL)")
    assert "dlctl checkpoint export" in error
    assert place.dlctl("checkpoint", "export").code == 0
    place.nothing_left()


# ---------------------------------------------------------------- what each party sees


@pytest.mark.parametrize("shape", ["u", pytest.param("vanilla", marks=pytest.mark.long)])
def test_no_sample_no_label_and_no_weight_of_the_client_reaches_the_head(
    place: Workplace, shape: str
) -> None:
    write(place, f'shape = "{shape}"', clients=1)
    lab = place.path / "lab" / "train.py"
    lab.write_text(RECORDING + lab.read_text())
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 0, ended.err
    messages = [*received(lab.parent)]
    assert {"PeerRequest", "Parameters"} <= {kind for kind, _ in messages}
    clinic = loaded(place.path / "clinic" / "train.py")
    seed_all(0)
    first = clinic.task.client_model()
    cut = first(clinic.X[:8]).detach().numpy()
    assert any(has(array, cut[0]) for _, array in messages), "the recording has what is sent"
    arrays = [array for _, array in messages]
    assert not any(has(array, row) for array in arrays for row in clinic.X.numpy()[::16])
    labels = clinic.Y.numpy()[:8]
    assert any(has(array, labels) for array in arrays) == (shape == "vanilla")
    weights = [first[0].weight.detach().numpy()[0]]
    weights += [
        value[0] for name, value in exported(place).items() if name.startswith("client.0.w")
    ]
    assert len(weights) == 2
    assert not any(has(array, weight) for array in arrays for weight in weights)
    names = {path.name for path in lab.parent.iterdir() if not path.name.startswith("received")}
    assert names <= {"train.py", "__pycache__"}
