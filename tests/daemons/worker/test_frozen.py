"""Frozen parameters keep dtypes and bits: in the file, in a checkpoint, in an export."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from manifests import whole
from safetensors.torch import load_file
from stepping import gradient_of
from torch import nn

from daemons.files import export
from daemons.files.arrays import Away
from daemons.worker import frozen_parameters
from daemons.worker.frozen_parameters import FrozenFile
from daemons.worker.replica import TorchReplica
from daemons.worker.task.user_task import Task, TaskError
from dlctl.errors import DlctlError
from dlctl.launch.base import HOST_FILE
from dlctl.model.frozen import DTYPES, differing, entries, plan, run_file
from dlctl.roles.protocol.effects import FrozenLoaded, FrozenWritten, LoadFrozen
from dlctl.roles.protocol.files import FilesMissing
from dlctl.runs import checkpoints
from dlctl.wire.messages import Register

LARGE = 2**62 + 1
"""An integer that no floating point number is."""


class Net(nn.Module):
    """One frozen tensor of each dtype, some of them odd, and a small trained one."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(3))
        for name in DTYPES:
            values = torch.full((2, 3), value).to(getattr(torch, name))
            self.register_parameter(f"of_{name}", nn.Parameter(values, requires_grad=False))
        large = torch.tensor([LARGE, -LARGE, round(value)])
        self.large = nn.Parameter(large, requires_grad=False)
        self.same = self.large
        self.none = nn.Parameter(torch.zeros(0, 4, dtype=torch.bfloat16), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.1, dtype=torch.float64), requires_grad=False)
        across = torch.randn(4, 3, dtype=torch.bfloat16).T
        self.across = nn.Parameter(across, requires_grad=False)


def replica(value: float = 1.0, seed: int = 7) -> TorchReplica:
    task = SimpleNamespace(
        model=lambda: Net(value), dataset=list, loss=lambda model, batch: model.trained.sum()
    )
    return TorchReplica(Task(task), device="cpu", seed=seed)


def registration(name: str) -> Register:
    return Register("run", "worker", name, 1, 7, "here", "0")


def bits(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {
        name: (tensor.dtype, bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
        for name, tensor in state.items()
        if tensor.numel()
    }


def test_the_file_has_every_dtype_bit_by_bit_under_its_names(tmp_path):
    made = replica()
    sha256, nbytes = frozen_parameters.write(made, tmp_path / "x.safetensors")
    assert checkpoints.file_problems(tmp_path / "x.safetensors", nbytes, sha256) == []
    state = bits(made.model.state_dict())
    names = {entry.name for entry in entries(made.layout)}
    assert "large" in names
    assert bits(load_file(tmp_path / "x.safetensors")) == {
        n: state[n] for n in names & state.keys()
    }


def test_who_has_built_others_has_the_run_s_after_a_load_and_reads_those_alone(tmp_path):
    made, other = replica(), replica(2.0)
    digests = frozen_parameters.digests(made)
    frozen_parameters.write(made, tmp_path / "file")
    others = differing(frozen_parameters.digests(other), digests)
    assert 0 < len(others) < len(entries(made.layout))
    assert frozen_parameters.load(other, tmp_path / "file", digests) == others
    assert bits(other.model.state_dict()) == bits(made.model.state_dict())
    assert other.model.same is other.model.large
    gradient_of(other, None)  # Nobody takes that for a change of the task's.
    assert differing(frozen_parameters.digests(other), digests) == []


def test_a_damaged_file_is_not_loaded(tmp_path):
    made, other = replica(), replica(2.0)
    digests = frozen_parameters.digests(made)
    frozen_parameters.write(made, tmp_path / "file")
    before = bits(other.model.state_dict())
    data = bytearray((tmp_path / "file").read_bytes())
    lo, _ = plan(made.layout).places[0]
    data[lo] ^= 1
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(DlctlError, match='"of_float64"'):
        frozen_parameters.load(other, tmp_path / "file", digests)
    assert bits(other.model.state_dict()) == before


def checkpoint_of(made: TorchReplica, run: Path) -> Path:
    """As a run writes one that has kept its frozen parameters."""
    directory = checkpoints.create(run, 12, 1)
    arrays = {"w": made.parameters, "averaged": made.averaged()}
    sha256, nbytes = checkpoints.write_arrays(directory / "shard-0.safetensors", arrays)
    shard = {"name": "server-0", "file": "shard-0.safetensors", "sha256": sha256, "state": {}}
    digests = frozen_parameters.digests(made)
    file = run_file(made.layout, digests)
    sha256, size = frozen_parameters.write(made, run / file)
    part = {"sha256": sha256, "nbytes": size, "digests": digests.hex(), "file": Path(file).name}
    manifest = whole(
        layout=made.layout.to_rows(), frozen=part,
        shards=[{**shard, "nbytes": nbytes, "lo": 0, "hi": made.layout.size()}],
    )  # fmt: skip
    checkpoints.share_frozen(run / "frozen", directory, manifest)
    checkpoints.write_manifest(directory, manifest)
    return directory


def test_an_export_has_them_bit_by_bit_and_a_resumed_run_too(tmp_path):
    made = replica()
    directory = checkpoint_of(made, tmp_path)
    assert checkpoints.verify(directory) == []
    output = tmp_path / "model.safetensors"
    assert export.main([str(directory), "--output", str(output)]) == 0
    assert bits(load_file(output)) == bits(made.model.state_dict())
    manifest = checkpoints.read_manifest(directory)
    (tmp_path / "again").mkdir()
    checkpoints.share_frozen(directory, tmp_path / "again" / "frozen", manifest)
    resumed = FrozenFile(tmp_path / "again", registration("worker-0"))
    other, digests = replica(3.0), bytes.fromhex(manifest["frozen"]["digests"])
    assert resumed.load(other, LoadFrozen(digests)) == FrozenLoaded()
    assert bits(other.model.state_dict()) == bits(made.model.state_dict())


def test_checkpoints_share_one_file_which_stays_as_long_as_one_of_them(tmp_path):
    first = checkpoint_of(replica(), tmp_path)
    manifest = checkpoints.read_manifest(first)
    file = manifest["frozen"]["file"]
    assert (first / file).samefile(tmp_path / "frozen" / file)
    second = tmp_path / "ckpt" / "000000000013-2"
    checkpoints.share_frozen(tmp_path / "frozen", second, manifest)
    assert checkpoints.remove(first)
    (tmp_path / "frozen" / file).unlink()
    assert (
        checkpoints.file_problems(
            second / file, manifest["frozen"]["nbytes"], manifest["frozen"]["sha256"]
        )
        == []
    )


def test_a_checkpoint_without_them_is_not_good(tmp_path):
    directory = checkpoint_of(replica(), tmp_path)
    file = checkpoints.read_manifest(directory)["frozen"]["file"]
    (directory / file).unlink()
    assert checkpoints.verify(directory) == [f"{directory / file}: missing"]


def test_on_another_host_it_asks_for_what_differs_and_leaves_no_copy(tmp_path):
    """Of 52 kB, say, some hundred bytes."""
    made, other = replica(), replica(2.0)
    home, host = tmp_path / "home", tmp_path / "host"
    digests = frozen_parameters.digests(made)
    file = run_file(made.layout, digests)
    host.mkdir()
    home.mkdir()
    frozen_parameters.write(made, home / file)
    (host / HOST_FILE).touch()
    there = FrozenFile(host, registration("worker-1"))
    missing = there.load(other, LoadFrozen(digests))
    assert isinstance(missing, FilesMissing)
    (wanted,) = missing.files
    content = (home / file).read_bytes()
    assert (wanted.file, wanted.nbytes) == (file, len(content))
    came = bytearray(len(content))
    for lo, hi in wanted.ranges:
        came[lo:hi] = content[lo:hi]
    assert sum(hi - lo for lo, hi in wanted.ranges) < len(content) / 4
    copy = Away(host, registration("worker-1")).root / file
    copy.parent.mkdir(parents=True)
    copy.write_bytes(came)
    assert there.load(other, LoadFrozen(digests)) == FrozenLoaded()
    assert bits(other.model.state_dict()) == bits(made.model.state_dict())
    assert not copy.exists()


def test_a_file_that_cannot_be_written_is_said_in_words(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "frozen").write_text("in the way")
    written = FrozenFile(run, registration("worker-0")).write(replica(), "frozen/x")
    assert isinstance(written, FrozenWritten)
    assert os.strerror(errno.EEXIST) in written.error


def test_a_dtype_that_no_file_has_is_refused_by_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained = nn.Parameter(torch.zeros(1))
            values: Any = torch.zeros(2).to(torch.float8_e4m3fnuz)
            self.odd = nn.Parameter(values, requires_grad=False)

    task = SimpleNamespace(model=Odd, dataset=list, loss=lambda model, batch: None)
    with pytest.raises(
        TaskError, match='parameter "odd" is float8_e4m3fnuz, which cannot be stored'
    ):
        TorchReplica(Task(task), device="cpu", seed=0)
