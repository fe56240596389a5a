"""`dlctl compressors`: the list, and what each makes of a real gradient of a job."""

import json

import pytest

from dlctl import registry
from dlctl.cli import app
from dlctl.errors import UsageError

TASK = """
import torch


class Task:
    def model(self):
        return torch.nn.Linear(80, 40)

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randn(64, 80, generator=generator))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


task = Task()
"""
JOB = """
[job]
name = "measured"
task = "train.py:task"
[compression]
name = "topk-sampled"
density = 0.05
[servers]
count = 2
[workers]
device = "cpu"
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "train.py").write_text(TASK)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


@pytest.fixture
def at_terminal(monkeypatch):
    """Errors and progress go to a terminal; the output does not."""
    monkeypatch.setattr("dlctl.cli.ui.console.is_tty", lambda *, err=False: err)
    monkeypatch.setenv("TERM", "xterm")


def test_every_compressor_is_listed_with_a_line(capsys):
    assert app.run(["compressors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == registry.names("compressors")
    assert all(len(line.split()) > 3 for line in lines[1:])


def test_each_is_measured_on_a_gradient_of_the_job(job, capsys, at_terminal):
    assert app.run(["compressors", "--job", str(job), "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = {row["name"]: row for row in json.loads(captured.out)["compressors"]}
    assert list(rows) == registry.names("compressors")
    assert all(row["elements"] == 80 * 40 + 40 for row in rows.values())
    assert rows["none"]["ratio"] == 1
    assert rows["none"]["relative_error"] == 0
    assert rows["fp16"]["ratio"] == rows["bf16"]["ratio"] == 2
    assert 0 < rows["fp16"]["relative_error"] < 2**-11
    assert 2**-11 < rows["bf16"]["relative_error"] < 2**-8
    assert [name for name, row in rows.items() if row["used"]] == ["topk-sampled"]
    assert rows["topk-sampled"]["push_bytes"] <= 0.05 * 3240 * 5.2
    assert rows["topk"]["relative_error"] <= rows["randomk"]["relative_error"] < 1
    assert 3.5 < rows["int8"]["ratio"] < 4
    assert rows["int8"]["relative_error"] < 0.05


@pytest.mark.long
def test_whoever_waits_at_a_terminal_is_told_what_for(job, capsys, at_terminal):
    assert app.run(["compressors", "--job", str(job), "--color", "never"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "loading the task and computing a gradient ...",
    ]


@pytest.mark.long
def test_what_a_push_lacks_is_its_error_also_where_nothing_waits_for_the_next_one(
    job, capsys, at_terminal
):
    job.write_text(
        JOB.replace("topk-sampled", "randomk").replace("[servers]", "unbiased = true\n[servers]")
    )
    assert app.run(["compressors", "--job", str(job), "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = {row["name"]: row for row in json.loads(captured.out)["compressors"]}
    # Of 1 in 20 elements 20 times each: E|u - Q(u)|^2 = (20 - 1) |u|^2.
    assert rows["randomk"]["relative_error"] == pytest.approx(19**0.5, rel=0.3)


@pytest.mark.long
def test_a_task_that_fails_is_an_error_that_names_its_line(job, capsys):
    job.with_name("train.py").write_text(TASK.replace("model(batch[0])", "model(batch[1])"))
    assert app.run(["compressors", "--job", str(job)]) == 7
    assert "train.py" in capsys.readouterr().err


def test_a_script_computes_its_own_gradients(job, capsys):
    job.write_text(job.read_text().replace('task = "train.py:task"', 'script = "train.py"'))
    assert app.run(["compressors", "--job", str(job)]) == UsageError.exit_code
    assert f"--> {job.with_name('train.py')}" in capsys.readouterr().err


def test_a_density_that_cannot_be_is_an_error_of_the_job_file_with_its_line(job, capsys):
    for name in ("topk", "topk-sampled", "gaussian", "gaussian-ref", "randomk"):
        for density in ("0", "1.5", "-0.1"):
            text = JOB.replace("topk-sampled", name).replace("0.05", density)
            job.write_text(text)
            assert app.run(["validate", str(job)]) == 2
            stderr = capsys.readouterr().err
            assert "density" in stderr
            assert f"job.toml:{text.splitlines().index(f'density = {density}') + 1}" in stderr


def test_a_run_with_a_damaged_job_is_named(run_directory, dlctl_command):
    run = run_directory("digits-7f3a")
    for text in ("", '{"jo": 1}', '{"job": 1}'):
        (run.path / "job.json").write_text(text)
        code, _, err = dlctl_command("compressors", "--job", "digits-7f3a")
        assert (code, "job.json" in err) == (1, True)


def test_a_job_that_is_not_there_is_not_found(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert app.run(["compressors", "--job", "nosuch"]) == 4
