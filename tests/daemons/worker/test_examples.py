"""The examples are what people try first: their jobs are valid, their tasks learn, their data is
what it should be or is said not to be."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import re
import runpy
import sys
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module, util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stepping import batch_of, gradient_of

from daemons.worker.data.portion_loader import PortionLoader
from daemons.worker.replica import TorchReplica
from daemons.worker.split.client import ClientParts
from daemons.worker.split.head import HeadParts
from daemons.worker.task.user_task import Task, TaskError, load_task, load_user
from dlctl import jobfile

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in ("train", "dlctl_task_train", "fashion_data", "task", "words"):
        if name not in before:
            sys.modules.pop(name, None)


JOBS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.toml"))


@pytest.mark.parametrize("name", JOBS)
def test_the_job_file_is_valid_and_names_a_task_that_loads(name):
    path = EXAMPLES / name
    job = jobfile.load(path)
    if job.has_loop:
        program = (path.parent / job.job.file).read_text()
        compile(program, job.job.file, "exec")
        assert "dlctl.attach(" in program or "dlctl.integrations" in program
    elif job.parties:
        tasks = [load_user(party.task, path.parent)[0] for party in job.parties]
        options = SimpleNamespace(**job.algorithm.options)
        assert Task(ClientParts(tasks[0], options, "the client")).has("evaluate")
        assert HeadParts(tasks[-1], options, "the head").model()
    else:
        assert load_task(job.job.task, path.parent).has("evaluate")


def test_digits_can_be_learned():
    task = load_task("train.py:task", EXAMPLES / "digits")
    replica = TorchReplica(task, device="cpu", seed=0)
    dataset = task.dataset()
    assert len(dataset) == 1437
    loader = PortionLoader(dataset, batch_size=32, seed=0, shuffle=True, processes=0)
    for epoch in range(6):
        for number in range(-(-len(dataset) // 32)):
            step = gradient_of(replica, batch_of(loader, epoch, 0, len(dataset), number))
            replica.parameters -= np.float32(0.1) * step.gradient
    assert replica.evaluate(replica.parameters, replica.averaged())["accuracy"] > 0.95


# ---------------------------------------------------------------- characters


@pytest.fixture
def chargpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES / "chargpt")
    return import_module("task")


def test_the_text_is_the_same_in_every_process_and_nothing_held_out_is_trained_on(chargpt):
    text = chargpt.source_text()
    assert len(text) == chargpt.TRAINED + chargpt.HELD_OUT
    assert int(text.max()) < len(chargpt.CHARACTERS) == 96
    trained, held_out = text[: chargpt.TRAINED], text[chargpt.TRAINED :]
    (samples,) = chargpt.task.dataset().tensors
    assert samples.shape == (chargpt.SAMPLES, chargpt.CONTEXT + 1)
    assert torch.equal(samples[0], trained[: chargpt.CONTEXT + 1])
    assert torch.equal(samples[-1], trained[-chargpt.CONTEXT - 1 :])
    windows = chargpt.windows(held_out, chargpt.EVALUATED)
    assert torch.equal(windows[-1], held_out[-chargpt.CONTEXT - 1 :])
    assert torch.equal(text, chargpt.source_text())


def test_a_standard_library_without_its_source_is_an_error_that_says_so(
    chargpt, tmp_path, monkeypatch
):
    (tmp_path / "abc.py").write_text("x = 1\n")
    monkeypatch.setattr(chargpt.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(chargpt.TextError, match=r" 6 .*2,000,000"):
        chargpt.source_text()


def test_no_position_knows_of_a_later_character(chargpt):
    torch.manual_seed(0)
    model = chargpt.task.model()
    assert 350_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 400_000
    one = torch.zeros((1, 8), dtype=torch.int64)
    other = one.clone()
    other[0, 5:] = 7
    with torch.no_grad():
        same = (model(one) - model(other)).abs().amax(-1)[0] < 1e-6
    assert same.tolist() == [True] * 5 + [False] * 3


def test_the_script_of_one_process_trains_and_writes(chargpt, monkeypatch, capsys):
    directory = EXAMPLES / "chargpt"
    argv = ["single.py", "--samples", "64", "--batch-size", "16"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(chargpt, "EVALUATED", 16)
    monkeypatch.setattr(chargpt, "sample", partial(chargpt.sample, count=20))
    runpy.run_path(str(directory / "single.py"), run_name="__main__")
    *written, last = capsys.readouterr().out.splitlines()
    assert written[0].startswith("def ")
    found = re.fullmatch(r"validation loss (\S+) after 64 samples", last)
    assert found is not None
    assert 3 < float(found[1]) < 4.6  # from ln 96 on


# ---------------------------------------------------------------- the files of Fashion-MNIST

TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an idx file."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Twelve pictures instead of 70000, under the same names."""
    rng = np.random.default_rng(0)
    arrays = {}
    for images, labels in (TRAIN, TEST):
        arrays[images] = rng.integers(0, 256, (6, 28, 28), np.uint8)
        arrays[labels] = rng.integers(0, 10, 6, np.uint8)
    return arrays


@pytest.fixture
def data(small, tmp_path, monkeypatch) -> ModuleType:
    """The example's module, told of the small files, and with nothing on this machine to find."""
    path = EXAMPLES / "fashion_mnist" / "fashion_data.py"
    spec = util.spec_from_file_location("fashion_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["fashion_data"] = module
    for name, array in small.items():
        module.FILES[name] = (array.shape, hashlib.sha256(idx(array)).hexdigest())
    monkeypatch.setattr(module, "DEBIAN", tmp_path / "no-package")
    monkeypatch.setattr(module, "URL", "http://127.0.0.1:9/")  # nobody listens there
    monkeypatch.delenv("DLCTL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


@pytest.fixture
def write_files(small):
    def write(directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for name, array in small.items():
            (directory / name).write_bytes(gzip.compress(idx(array)))
        return directory

    return write


class Quiet(http.server.SimpleHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(data, write_files, tmp_path) -> Iterator[type[Quiet]]:
    """A web server with the files; notes what it was asked for."""
    handler = type("Noting", (Quiet,), {"asked": []})
    directory = str(write_files(tmp_path / "www"))
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(handler, directory=directory)
    ) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        data.URL = f"http://127.0.0.1:{running.server_address[1]}/"
        yield handler
        running.shutdown()
        thread.join()


def test_files_of_the_package_are_used_where_they_are(data, small, write_files, tmp_path):
    write_files(data.DEBIAN)
    images, labels = data.load("train")
    assert np.array_equal(images, small[TRAIN[0]])
    assert np.array_equal(labels, small[TRAIN[1]])
    assert images.flags.writeable, "torch wants memory of its own"
    assert not (tmp_path / "cache").exists()


def test_the_user_s_own_directory_comes_first(data, write_files, tmp_path, monkeypatch):
    write_files(data.DEBIAN)
    own = write_files(tmp_path / "own")
    monkeypatch.setenv("DLCTL_DATA", str(own))
    assert data.find(TRAIN) == own


def test_what_is_missing_is_downloaded_into_the_cache_once(data, server, small, tmp_path):
    for _ in range(2):
        images, _ = data.load("t10k")
        assert np.array_equal(images, small[TEST[0]])
    assert server.asked == [f"/{name}" for name in TEST]
    cache = tmp_path / "cache" / "dlctl" / "fashion-mnist"
    assert sorted(path.name for path in cache.iterdir()) == [".lock", *sorted(TEST)]


def test_workers_that_start_together_download_once(data, server, tmp_path):
    workers = [threading.Thread(target=data.load, args=("train",)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(server.asked) == [f"/{name}" for name in TRAIN]


def test_a_download_goes_into_the_user_s_directory_if_there_is_one(
    data, server, tmp_path, monkeypatch
):
    monkeypatch.setenv("DLCTL_DATA", str(tmp_path / "own"))
    data.load("train")
    assert (tmp_path / "own" / TRAIN[0]).is_file()


def test_a_download_with_the_wrong_content_is_refused_and_not_kept(data, server, tmp_path):
    wrong = np.zeros((6, 28, 28), np.uint8)
    (tmp_path / "www" / TRAIN[0]).write_bytes(gzip.compress(idx(wrong)))
    with pytest.raises(
        data.DataError, match=r"what came from http://.* has not the SHA-256 that it should; try"
    ):
        data.load("train")
    cache = tmp_path / "cache" / "dlctl" / "fashion-mnist"
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_without_network_it_says_what_to_do(data):
    with pytest.raises(data.DataError) as caught:
        data.load("train")
    text = str(caught.value)
    assert "http://127.0.0.1:9/" in text
    assert "apt install dataset-fashion-mnist" in text
    assert "DLCTL_DATA" in text


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda whole: whole[:100], "cannot be read"),
        (lambda whole: b"<html>not found</html>", "cannot be read"),
        (lambda whole: gzip.compress(gzip.decompress(whole)[:-1]), "is not an idx file of shape"),
        (lambda whole: gzip.compress(gzip.decompress(whole) + b"x"), "is not an idx file of shape"),
        (lambda whole: gzip.compress(bytes(10**8)), "is not an idx file of shape"),
    ],
    ids=["cut", "web page", "too short", "too long", "bomb"],
)
def test_a_damaged_file_is_named(data, write_files, tmp_path, monkeypatch, damage, complaint):
    path = write_files(tmp_path / "own") / TRAIN[0]
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setenv("DLCTL_DATA", str(tmp_path / "own"))
    with pytest.raises(data.DataError, match=complaint) as caught:
        data.load("train")
    assert str(path) in str(caught.value)
    assert "remove" in str(caught.value)


def test_the_fashion_task_trains_and_evaluates_on_what_was_found(data, write_files):
    write_files(data.DEBIAN)
    task = load_task("train.py:task", EXAMPLES / "fashion_mnist")
    replica = TorchReplica(task, device="cpu", seed=0)
    assert replica.parameters.size == 235146
    loader = PortionLoader(task.dataset(), batch_size=4, seed=0, shuffle=True, processes=0)
    first = gradient_of(replica, batch_of(loader, 0, 0, 6, 0))
    replica.parameters -= np.float32(0.1) * first.gradient
    assert gradient_of(replica, batch_of(loader, 0, 0, 6, 0)).loss < first.loss
    metrics = replica.evaluate(replica.parameters, replica.averaged())
    assert set(metrics) == {"accuracy", "test_loss"}


def test_missing_data_stops_the_worker_with_the_reason(data):
    task = load_task("train.py:task", EXAMPLES / "fashion_mnist")
    with pytest.raises(TaskError, match="DataError"):
        task.dataset()
