"""What comes out of a checkpoint is what the user's own load_state_dict takes."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from manifests import whole
from safetensors.torch import load_file
from stepping import gradient_of
from torch import nn

from daemons.files import export
from daemons.worker import frozen_parameters
from daemons.worker.replica import TorchReplica
from daemons.worker.task.user_task import Task
from dlctl.model.flat import slice_bounds
from dlctl.model.frozen import file_name
from dlctl.records.manifest import parse, serialise
from dlctl.runs import checkpoints

LOADERS = {
    "safetensors": load_file,
    "torch": lambda path: torch.load(path, weights_only=True),
}


def save(
    replica: TorchReplica, directory: Path, shards: int = 2, average: np.ndarray | None = None
) -> Path:
    """A checkpoint as the servers and the coordinator write one."""
    directory.mkdir()
    size = replica.layout.size()
    parts = []
    for index in range(shards):
        lo, hi = slice_bounds(size, shards, index)
        arrays = {"w": replica.parameters[lo:hi]}
        if average is not None:
            arrays["slot.average"] = average[lo:hi]
        if index == 0:
            arrays["averaged"] = replica.averaged()
        file = f"shard-{index}.safetensors"
        sha256, nbytes = checkpoints.write_arrays(directory / file, arrays)
        name = f"server-{index}"
        part = {"name": name, "file": file, "sha256": sha256, "nbytes": nbytes, "state": {}}
        parts.append({**part, "lo": lo, "hi": hi})
    layout = json.loads(replica.layout.to_bytes())
    digests = frozen_parameters.digests(replica)
    file = file_name(replica.layout, digests)
    sha256, nbytes = frozen_parameters.write(replica, directory / file)
    part = {"file": file, "sha256": sha256, "nbytes": nbytes, "digests": digests.hex()}
    manifest = whole(layout=layout, shards=parts, step=10, samples=100, frozen=part)
    checkpoints.write_manifest(directory, manifest)
    return directory


@pytest.fixture
def trained(animal: Any) -> TorchReplica:
    """A model of the zoo after a step, so that no tensor has its initial value."""
    replica = TorchReplica(Task(animal), device="cpu", seed=1)
    gradient = gradient_of(replica, animal.batch()).gradient
    replica.parameters -= np.float32(0.1) * gradient + np.float32(0.01)
    gradient_of(replica, animal.batch())
    return replica


@pytest.mark.parametrize("to", sorted(export.WRITERS))
def test_an_exported_model_computes_what_the_trained_one_did(animal, trained, tmp_path, to):
    output = tmp_path / "model.out"
    assert (
        export.main([str(save(trained, tmp_path / "ckpt")), "--to", to, "--output", str(output)])
        == 0
    )
    state = LOADERS[to](output)
    expected = trained.model.state_dict()
    assert set(state) == set(expected)
    for name, tensor in state.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    model: nn.Module = animal.model()
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert animal.evaluate(model.eval()) == animal.evaluate(trained.model.eval())


def test_the_names_come_in_the_model_s_own_order(zoo, tmp_path):
    replica = TorchReplica(Task(zoo["conv_batchnorm"]), device="cpu", seed=1)
    directory = save(replica, tmp_path / "ckpt")
    state = export.state_dict(directory, checkpoints.read_manifest(directory))
    assert list(state) == list(replica.model.state_dict())


def test_the_average_is_exported_if_the_checkpoint_has_one(zoo, tmp_path, capsys):
    replica = TorchReplica(Task(zoo["mlp"]), device="cpu", seed=1)
    average = replica.parameters + np.float32(1)
    output, with_one = tmp_path / "model.safetensors", save(replica, tmp_path / "a", 2, average)
    assert export.main([str(with_one), "--output", str(output), "--average"]) == 0
    for name, tensor in load_file(output).items():
        assert torch.allclose(tensor, replica.model.state_dict()[name] + 1)
    output.unlink()
    without = save(replica, tmp_path / "b")
    assert export.main([str(without), "--output", str(output), "--average"]) == 1
    assert "average" in capsys.readouterr().err
    assert not output.exists()


# ---------------------------------------------------------------- what may go wrong


@pytest.fixture
def checkpoint(zoo: Any, tmp_path: Path) -> Path:
    return save(TorchReplica(Task(zoo["mlp"]), device="cpu", seed=1), tmp_path / "ckpt")


def test_a_damaged_checkpoint_is_not_exported(checkpoint, tmp_path, capsys):
    shard = checkpoint / "shard-1.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    output = tmp_path / "model.pt"
    output.write_text("the old one")
    assert export.main([str(checkpoint), "--to", "torch", "--output", str(output)]) == 1
    assert output.read_text() == "the old one"
    error = json.loads(capsys.readouterr().err)
    assert "checkpoint" in error["message"]
    assert "SHA-256" in error["message"]
    assert error["where"] == str(checkpoint)


def test_an_output_that_can_be_no_file_is_a_wrong_argument(checkpoint, tmp_path, capsys):
    assert export.main([str(checkpoint), "--output", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err
    assert export.main([str(checkpoint), "--output", str(tmp_path / "no" / "where")]) == 2
    assert "directory" in capsys.readouterr().err


def test_a_dtype_that_this_torch_lacks_is_named(checkpoint, tmp_path, capsys):
    path = checkpoint / "manifest.json"
    known = parse(path.read_bytes(), str(path))
    foreign = json.loads(json.dumps(known).replace("float32", "float31"))
    path.write_bytes(serialise(foreign, str(path)))
    assert export.main([str(checkpoint), "--output", str(tmp_path / "model")]) == 1
    told = json.loads(capsys.readouterr().err)["message"]
    assert [text in told for text in ('"0.weight"', "float31")] == [True, True]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("to", sorted(export.WRITERS))
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_the_file_is_as_the_umask_says(checkpoint, tmp_path, to, mask, mode):
    output = tmp_path / "model"
    with umask(mask):
        assert export.main([str(checkpoint), "--to", to, "--output", str(output)]) == 0
    assert output.stat().st_mode & 0o777 == mode


def test_other_programs_get_the_error_as_json(checkpoint, tmp_path, capsys):
    output = str(tmp_path / "no where" / "model")
    assert export.main([str(checkpoint), "--output", output]) == 2
    assert json.loads(capsys.readouterr().err) == {
        "message": "the output would be in a directory that does not exist",
        "where": output,
        "hint": f"mkdir -p '{tmp_path / 'no where'}'",
    }


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """No file may grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("to", sorted(export.WRITERS))
def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(checkpoint, tmp_path, capsys, to):
    output = tmp_path / "model"
    output.write_text("the old one")
    with full_disk(free_bytes=200):
        assert export.main([str(checkpoint), "--to", to, "--output", str(output)]) == 1
    assert output.read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "model"]
    assert '"message": "cannot write: ' in capsys.readouterr().err
