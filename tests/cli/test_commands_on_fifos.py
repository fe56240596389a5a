"""Files that are FIFOs: every command ends with an error that names the file and what it is.

Nobody writes to these FIFOs, so a command that opened one as it opens a file would wait until the
time limit of the test ends it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dead_runs import acknowledge, keep, remember, save
from process_identity import identity

from dlctl.cli.app import BUG_EXIT_CODE
from dlctl.control import keys
from dlctl.errors import DlctlError
from dlctl.job import config
from dlctl.runs import kept_shards, task_code
from dlctl.util import regular
from dlctl.util.regular import NotRegular

IS_FIFO = "is a FIFO, not a regular file"
JOB = '[job]\nname = "digits"\ntask = "train.py:task"\nstop = { epochs = 1 }\n'
COMMANDS = [
    ("ps",), ("status",), ("status", "--json"), ("logs",), ("logs", "--failed"),
    ("logs", "-f", "-n", "3"), ("events",), ("why",), ("get",), ("wait", "--for", "stopped"),
    ("report", "-o", "out.html"), ("plot", "-o", "out.png"), ("checkpoint", "ls"),
    ("checkpoint", "verify"), ("checkpoint", "prune", "--keep", "1", "--dry-run"), ("verify",),
    ("recover", "--dry-run"), ("keys", "rotate"), ("stop",),
]  # fmt: skip


def replaced(path: Path) -> Path:
    """The same name for a FIFO, which nobody opens."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.fixture
def dead(run_directory: Any, own_place: Path) -> Iterator[Any]:
    """A run that has died, with a file of every kind that it can have."""
    (own_place / "job.toml").write_text(JOB)
    (own_place / "train.py").write_text("task = None\n")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        gone = identity(ended.pid)
    run = run_directory("fifos-7f3a", servers=1, workers=1)
    job_file = str(own_place / "job.toml")
    run.run(state="running", step=88, job_file=job_file, **gone)
    run.daemon("server-0", **gone).daemon("worker-0", **gone)
    run.log("worker-0", 1, {"ts": "2026-01-01T00:00:00Z", "level": "info", "msg": "step 1"})
    run.log("worker-0", 1, {"ts": "2025-01-01T00:00:00Z", "msg": "older"}, suffix=".1")
    shutil.copy(own_place / "job.toml", run.path)
    keys.renew(run.path)
    (run.path / "lock").touch()
    task_code.as_it_was(run.path, own_place / "train.py", b"task = None\n")
    save(run, 50, 1)
    acknowledge(run, 0, 1, 1, 7)
    remember(run, "server-0")
    state = keep(run, 0, version=3, deliveries=[[0, 1, 7]])
    yield run
    state.unlink(missing_ok=True)  # A FIFO stays.
    kept_shards.remove(run.path, config.Servers())


TOLD_BY = {
    "run.db": "status",
    "run.db-wal": "status",
    "run.db-shm": "status",
    "run.db-journal": "status",
    "terms": "status",
    "job.json": "recover --dry-run",
    "job.toml": "",
    "key": "",
    "lock": "",
    "logs/worker-0.1.jsonl": "logs",
    "logs/worker-0.1.jsonl.1": "logs",
    "acks/worker-0.1": "verify",
    "ckpt/000000000050-1/manifest.json": "checkpoint verify",
    "ckpt/000000000050-1/shard-0.safetensors": "checkpoint ls",
}
"""A file of a run, and a command that needs it, if there is one for a run that has died."""


@pytest.mark.per_commit(4)
@pytest.mark.parametrize("name", TOLD_BY)
def test_a_run_with_a_fifo_in_it_keeps_no_command_waiting(dead, dlctl_command, name) -> None:
    dead.db.close()
    replaced(dead.path / name)
    output = {}
    for command in COMMANDS:
        code, out, err = dlctl_command(*command)
        assert code != BUG_EXIT_CODE, (command, err)
        output[" ".join(command)] = out + err
    if command := TOLD_BY[name]:
        assert Path(name).name in output[command]
        assert IS_FIFO in output[command]


def test_a_state_of_a_server_is_named_by_recover(dead, dlctl_command) -> None:
    (state, *_) = kept_shards.kept(dead.path, config.Servers())
    replaced(state.path)
    recovery = dlctl_command("recover", "--dry-run")
    assert "FIFO" in recovery.rows["server-0"]


def test_a_key_is_named(dead, tmp_path, dlctl_command) -> None:
    replaced(dead.path / "key")
    with pytest.raises(DlctlError, match=f"cannot read the run's key: it {IS_FIFO}"):
        keys.read(dead.path)
    ended = dlctl_command("status", "--key", str(replaced(tmp_path / "bob.key")))
    assert (ended.code, f"cannot read the reader's key: it {IS_FIFO}" in ended.err) == (1, True)


@pytest.mark.parametrize(
    "command", ["validate", "plan", "doctor", "start", "run", "compressors --job"]
)
def test_a_job_file_is_named(own_place, dlctl_command, command) -> None:
    replaced(own_place / "job.toml")
    ended = dlctl_command(*command.split(), "job.toml")
    assert ended.code == 2
    assert "job.toml" in ended.err
    assert IS_FIFO in ended.err


def test_what_a_job_file_names_is_named(own_place, dlctl_command) -> None:
    replaced(own_place / "train.py")
    (own_place / "job.toml").write_text(JOB.replace("stop", 'weights = "w.safetensors"\nstop'))
    replaced(own_place / "w.safetensors")
    ended = dlctl_command("validate", "job.toml")
    assert ended.code == 2
    assert '"train.py" is a FIFO' in ended.err
    assert '"w.safetensors" is a FIFO' in ended.err


@pytest.mark.parametrize("name", ["manifest.json", "shard-0.safetensors"])
def test_a_checkpoint_of_another_run_is_named(dead, own_place, dlctl_command, name) -> None:
    source = dead.path / "ckpt" / "000000000050-1"
    replaced(source / name)
    for command in (
        ("start", "--from", str(source), "job.toml"),
        ("checkpoint", "verify", str(source)),
        ("checkpoint", "export", str(source), "-o", "model.safetensors"),
    ):
        code, out, err = dlctl_command(*command)
        assert code == 1
        assert name in out + err
        assert IS_FIFO in out + err
    assert not (own_place / "model.safetensors").exists()


def test_other_things_than_fifos_are_named_too(tmp_path) -> None:
    def refusal(path: Path, flags: int = os.O_RDONLY) -> str:
        with pytest.raises(NotRegular) as refused:
            regular.descriptor(path, flags)
        return str(refused.value)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert refusal(tmp_path / "s") == f"{tmp_path / 's'} is a socket, not a regular file"
    (tmp_path / "link").symlink_to("/dev/zero")
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        assert "is a directory, not" in refusal(tmp_path, flags)
        assert "is a character device, not" in refusal(Path("/dev/zero"), flags)
        assert "is a character device, not" in refusal(tmp_path / "link", flags)
        assert "is a symbolic link, not" in refusal(tmp_path / "link", flags | os.O_NOFOLLOW)
        assert IS_FIFO in refusal(replaced(tmp_path / "fifo"), flags)
    with pytest.raises(FileNotFoundError):
        regular.opened(tmp_path / "nothing")
    (tmp_path / "file").write_text("content")
    with regular.opened(tmp_path / "file") as file:
        assert os.get_blocking(file.fileno())
        assert Path(regular.name_of(file)).read_text() == "content"
