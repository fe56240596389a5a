"""`dlctl init`: files that work as they are, and nothing that was there is lost."""

from __future__ import annotations

import importlib.util
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest

import dlctl
from dlctl import jobfile
from dlctl.cli import app
from dlctl.cli.commands import init
from dlctl.cli.ui import console
from dlctl.errors import NotFound
from dlctl.ops import examples

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / init.SMALLEST
FILES = ("job.toml", "train.py")


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
    assert f"{present} " in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == [present]
    assert Path(present).read_text() == "mine"


def test_force_overwrites() -> None:
    Path("job.toml").write_text("mine")
    assert app.run(["init", "--force"]) == 0
    assert Path("job.toml").read_text() == (TEMPLATE / "job.toml").read_text()


def test_a_directory_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert app.run(["init", "file/demo"]) == 1
    assert "  --> file" in capsys.readouterr().err


def test_an_example_is_written_as_it_is_and_nothing_else_of_its_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["init", "--example", "digits", "new"]) == 0
    written = {path.name: path.read_bytes() for path in Path("new").iterdir()}
    assert written == {path.name: path.read_bytes() for path in init.files("digits")}
    assert written.keys() == {
        "README.md", "digits.npz", "job.toml", "joined.toml", "loop.py", "train.py",
    }  # fmt: skip
    told = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    assert "dlctl run new/job.toml trains with downpour" in told
    assert app.run(["validate", "new/job.toml"]) == 0


@pytest.mark.parametrize("name", examples.folders())
def test_every_example_can_be_written_and_is_named_in_the_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["init", "--example", name, "new"]) == 0
    jobs = sorted(Path("new").glob("*.toml"))
    error = capsys.readouterr().err
    assert [job for job in jobs if f"dlctl run {job} " not in error] == []
    assert app.run(["init", "--help"]) == 0
    assert name in (init.SMALLEST, init.LOOP) or name in capsys.readouterr().out


def test_of_an_unknown_example_the_likely_one_is_suggested_and_all_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["init", "--example", "chatgpt", "new"]) == NotFound.exit_code
    error = capsys.readouterr().err
    assert '"chargpt"' in error
    assert [name for name in examples.folders() if name not in error] == []
    assert not Path("new").exists()


def test_an_example_overwrites_nothing_unless_forced() -> None:
    Path("train.py").write_text("mine")
    assert app.run(["init", "--example", "digits"]) == 1
    assert [path.name for path in Path().iterdir()] == ["train.py"]
    assert Path("train.py").read_text() == "mine"
    assert app.run(["init", "--example", "digits", "--force"]) == 0
    assert Path("train.py").read_text() != "mine"


def test_a_wheel_has_the_examples_where_init_looks_for_them() -> None:
    """And it leaves nothing of them out: what git ignores is no part of a wheel."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert "exclude" not in wheel
    assert {"dlctl", "daemons", "examples"} == set(wheel["only-include"])
    package = Path(dlctl.__file__).parent
    place = package.parent / wheel["sources"]["examples"]
    assert (place, ROOT / "examples") == examples.FOLDERS
    ignored = [line for line in (ROOT / ".gitignore").read_text().split() if "/" not in line[:-1]]
    names = [path.name for example in examples.folders() for path in init.files(example)]
    assert [n for n in names if any(fnmatch(n, i.strip("/")) for i in ignored)] == []


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


def test_an_example_of_two_parties_comes_with_their_folders() -> None:
    assert app.run(["init", "--example", "split", "mine"]) == 0
    found = {path.relative_to("mine").as_posix() for path in Path("mine").glob("*/*")}
    assert found == {"clinic/train.py", "clinic/digits.npz", "lab/train.py"}
