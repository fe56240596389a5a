"""The process that runs a user's program: what the program finds there, and how its end is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlctl import jobfile
from dlctl.job.config import to_dict
from dlctl.launch import base
from dlctl.runs import logs, paths

ROOT = Path(__file__).parents[2]
JOB = """
[job]
name = "own"
{program}
args = ["--lr", "0.1"]
[algorithm]
name = "local-sgd"
[workers]
threads = 3
"""
STUB = """
import json, os, sys
from daemons.attach import context

class Session:
    has_joined = True
    def end(self, end):
        failed = end.failure("before the run was over", "train longer")
        print(json.dumps({"error": failed.error, "detail": failed.detail}))
        return end.code

started = context.started()
started.session = Session()
"""
TELL = """
print(json.dumps({
    "name": __name__, "spec": __spec__ and __spec__.name, "argv": sys.argv, "path": sys.path[0],
    "file": __file__, "is_main": sys.modules["__main__"].__dict__ is globals(),
    "rank": "RANK" in os.environ, "threads": os.environ["OMP_NUM_THREADS"],
    "worker": started.context.registration.name, "torch": "torch" in sys.modules,
}))
"""
Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the program of a job in one of its workers; returns the exit code, and the lines of JSON
    that it has printed.
    """
    directory = tmp_path / "runs" / "own-0001"
    directory.mkdir(parents=True)

    def ran(program: str = 'script = "train.py"', incarnation: int = 1) -> Any:
        file = tmp_path / "job.toml"
        file.write_text(JOB.format(program=program))
        (directory / "job.json").write_text(json.dumps(to_dict(jobfile.load(file))))
        assert base.has_loop("worker", directory)
        argv = base.argv("worker", directory, "worker-0", incarnation, "ipc:///no", has_loop=True)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        env.pop("OMP_NUM_THREADS", None)
        log = base.open_log(directory, "worker-0", incarnation)
        with os.fdopen(log):
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, timeout=60
            )
        path = paths.log_path(directory, "worker-0", incarnation)
        lines = [logs.parse(line, "", 0, 0.0) for line in path.read_text().splitlines()]
        said = [line.text for line in lines if line.fields.get("stream") == "stdout"]
        return done.returncode, [json.loads(text) for text in said if text.startswith("{")]

    return ran


def test_a_script_runs_as_python_would_run_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STUB + TELL)
    code, (found, _) = run()
    assert code == 0
    assert found == {
        "name": "__main__", "spec": None, "argv": [str(tmp_path / "train.py"), "--lr", "0.1"],
        "path": str(tmp_path), "file": str(tmp_path / "train.py"), "is_main": True, "rank": False,
        "threads": "3", "worker": "worker-0", "torch": False,
    }  # fmt: skip


def test_a_module_has_its_package(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "near.py").write_text("VALUE = 1\n")
    (tmp_path / "pkg" / "fit.py").write_text(f"from .near import VALUE\n{STUB}{TELL}")
    code, (found, _) = run('module = "pkg.fit"')
    assert code == 0
    assert (found["spec"], found["path"]) == ("pkg.fit", str(tmp_path))
    assert (found["name"], found["is_main"]) == ("__main__", True)


@pytest.mark.long
def test_a_replacement_runs_the_code_that_the_run_began_with(run: Run, tmp_path: Path) -> None:
    helper, train = tmp_path / "helper.py", tmp_path / "train.py"
    helper.write_text("VALUE = 1\n")
    train.write_text(f'{STUB}import helper\nprint(json.dumps({{"is": helper.VALUE}}))\n')
    _, (before, _) = run()
    helper.write_text("VALUE = 2\n")
    train.write_text("raise SystemExit(3)\n")
    code, (after, _) = run(incarnation=2)
    assert (code, before, after) == (0, {"is": 1}, {"is": 1})


def test_what_is_registered_for_the_exit_is_done(run: Run, tmp_path: Path) -> None:
    late = 'import atexit, json\natexit.register(print, json.dumps({"late": 1}))\n'
    (tmp_path / "train.py").write_text(STUB + late)
    assert run()[1][-1] == {"late": 1}


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("x = 1", 0, "train.py has ended before the run was over ({file}); train longer"),
        (
            "sys.exit(0)", 0,
            "train.py has exited with code 0 before the run was over ({file}:{line}); train longer",
        ),
        (
            "sys.exit('no data')", 1,
            'train.py has exited with "no data" before the run was over ({file}:{line}); '
            "train longer",
        ),
        ("[][1]", 1, "running train.py raised IndexError: list index out of range ({file}:{line})"),
    ],
)  # fmt: skip
def test_the_end_of_a_program_is_told_with_its_line(
    run: Run, tmp_path: Path, does: str, code: int, says: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(STUB + does)
    line = STUB.count("\n") + 1
    status, found = run()
    assert status == code
    assert found[-1]["error"] == says.format(file=file, line=line)
    assert ("Traceback" in found[-1]["detail"]) == ("raised" in says)


END = """
import json, sys
from pathlib import Path
from daemons.script import program
from dlctl.job.config import Job
end = program.run(Job(name="own", script=sys.argv[1]), None)
print(json.dumps(end))
"""


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("import dlctl\n\ndef f(:\n", 3, ""),
        ("import nothing_like_this\n", 1, "install what provides"),
        ("print(1)\n", 0, "train.py does not import dlctl"),
        ("import dlctl\n", 0, ""),
    ],
)
def test_a_program_that_never_attaches_gets_a_remedy(
    tmp_path: Path, text: str, line: int, hint: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", END, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    _, where, said, code, is_error, _ = json.loads(done.stdout.splitlines()[-1])
    assert where == (f"{file}:{line}" if line else str(file))
    assert said.startswith(hint)
    assert (code, is_error) == ((1, True) if line else (0, False))
