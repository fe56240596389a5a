"""`dlctl init`: two files that work as they are, and nothing that was there is lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from dlctl import jobfile
from dlctl.cli import app
from dlctl.cli.commands.init import FILES, TEMPLATE
from dlctl.cli.ui import console

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task"


@pytest.fixture(autouse=True)
def fresh_console(own_place: Path):
    yield
    console.setup()


def test_it_writes_both_files_and_says_what_to_do_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["init", "a demo"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "a demo/job.toml\na demo/train.py\n"
    assert "  dlctl run 'a demo/job.toml'  " in captured.err
    assert "  dlctl status  " in captured.err
    assert app.run(["validate", "a demo/job.toml"]) == 0


def test_without_a_directory_it_writes_here() -> None:
    assert app.run(["init", "-q"]) == 0
    assert sorted(path.name for path in Path().iterdir()) == sorted(FILES)


@pytest.mark.parametrize("present", FILES)
def test_it_never_overwrites_and_then_writes_nothing_at_all(
    present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(present).write_text("mine")
    assert app.run(["init"]) == 1
    assert f"{present} already exists; nothing was written" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == [present]
    assert Path(present).read_text() == "mine"


def test_force_overwrites() -> None:
    Path("job.toml").write_text("mine")
    assert app.run(["init", "--force"]) == 0
    assert Path("job.toml").read_text() == (TEMPLATE / "job.toml").read_text()


def test_a_directory_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert app.run(["init", "file/demo"]) == 1
    assert "error: cannot write: Not a directory\n  --> file" in capsys.readouterr().err


def test_the_example_of_ones_own_task_is_what_init_writes() -> None:
    assert sorted(path.name for path in EXAMPLE.iterdir() if path.is_file()) == sorted(FILES)
    for name in FILES:
        assert (EXAMPLE / name).read_bytes() == (TEMPLATE / name).read_bytes(), name


def test_the_job_file_that_init_writes_is_one_page_and_valid() -> None:
    job = jobfile.load(TEMPLATE / "job.toml")
    assert job.job.stop.seconds is not None
    assert job.job.stop.seconds >= 60, "there is time for the commands of the README"
    assert len((TEMPLATE / "job.toml").read_text().splitlines()) <= 40


def _task_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dlctl_template_train", TEMPLATE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread():
    """A tiny model is slower with more, above all where the tests are not alone."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_task_that_init_writes_learns_with_the_optimizer_of_its_job() -> None:
    import torch

    job = jobfile.load(TEMPLATE / "job.toml")
    assert job.optimizer.name == "adagrad"
    task = _task_module().task
    torch.manual_seed(job.job.seed)
    model = task.model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=job.optimizer.options["lr"])
    data = task.dataset()
    for epoch in range(8):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        for some in order.split(job.workers.batch_size):
            optimizer.zero_grad()
            task.loss(model, list(data[some])).backward()
            optimizer.step()
    assert task.evaluate(model)["accuracy"] >= 0.95
