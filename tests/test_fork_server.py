"""A process that is forked for a test is what its command line would have started."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
import pytest

OURS = "# from dlctl.cli.app import main\n"
"""What a program must have to be forked."""
TELL = """
import fcntl, json, os, resource, signal, sys, threading
from pathlib import Path
fds = sorted(int(f) for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}"))
streams = [sys.stdin, sys.stdout, sys.stderr]
parent = os.getppid()
print(json.dumps({
    "argv": sys.argv, "words": sys.orig_argv, "name": __name__, "path": sys.path,
    "line": Path("/proc/self/cmdline").read_bytes().decode(),
    "shown": sorted(Path("/proc/self/environ").read_bytes().decode().split("\\0")),
    "environ": dict(os.environ), "cwd": os.getcwd(), "umask": os.umask(0), "nice": os.nice(0),
    "fds": [fd for fd in fds if fd != 700], "parent": parent, "safe": sys.flags.safe_path,
    "group": os.getpgrp() == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "cores": sorted(os.sched_getaffinity(0)),
    "int": str(signal.getsignal(signal.SIGINT)), "pipe": str(signal.getsignal(signal.SIGPIPE)),
    "threads": threading.active_count(), "input": sys.stdin.read(),
    "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through)
                for s in streams],
}))
"""
BOTH = [subprocess.Popen, fork_server.Popen]
Start = Callable[..., "subprocess.Popen[str]"]


def start(popen: Any, program: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(fork_server.ROOT), "SAID": "this"}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-P", "-c", OURS + program, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started: subprocess.Popen[str] = popen(
        command, text=True, env=environment, **{**pipes, **options}
    )
    return started


@pytest.mark.parametrize("is_session", [True, False])
def test_it_is_as_if_it_had_been_executed(tmp_path: Path, is_session: bool) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0][0] - 1, before[0][1]))
    reader, writer = os.pipe()
    try:
        told = []
        for popen in BOTH:
            process = start(
                popen, TELL, "a word", "", cwd=tmp_path, start_new_session=is_session,
                pass_fds=[writer],
            )  # fmt: skip
            out, err = process.communicate("given", timeout=60)
            assert (process.returncode, err) == (0, "")
            told.append(json.loads(out))
    finally:
        os.close(reader)
        os.close(writer)
        os.umask(before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, before[0])
    assert told[1] == told[0]
    assert told[1]["parent"] == os.getpid()
    assert told[1]["umask"] == 0o027


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('it cannot')", 1, "it cannot"),
        ("import os; os._exit(4)", 4, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import atexit, os; atexit.register(os._exit, 5)", 5, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.close(1); print(1)", 120, "Bad file descriptor"),
    ],
)
def test_it_ends_as_if_it_had_been_executed(program: str, code: int, said: str) -> None:
    for popen in BOTH:
        process = start(popen, program)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert said in err
        assert bool(err) == bool(said)


def test_what_it_starts_is_its_child_and_may_be_forked_as_well() -> None:
    program = f"""
import os, subprocess, sys
tell = {OURS!r} + "import os, sys; print(os.getppid(), 'torch' in sys.modules)"
command = [sys.executable, "-P", "-c", tell]
print(os.getpid(), subprocess.run(command, stdout=-1, check=True, text=True).stdout)
"""
    out, err = start(fork_server.Popen, program).communicate(timeout=60)
    mine, parent, has_torch = out.split()
    assert (mine, has_torch) == (parent, "True"), err


def test_exec_replaces_it() -> None:
    program = f"""
import os, sys
print(os.getpid(), flush=True)
words = [sys.executable, "-P", "-c", {OURS!r} + "import os, sys; print(os.getpid(), sys.argv)", "b"]
os.execv(words[0], words)
"""
    for popen in BOTH:
        out, err = start(popen, program).communicate(timeout=60)
        first, second = out.splitlines()
        assert second == f"{first} ['-c', 'b']", err


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "PYTHONHASHSEED", "LD_PRELOAD"])
def test_with_another_start_it_is_executed(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "77" if variable != "LD_PRELOAD" else "")
    program = "import sys; print('torch' in sys.modules)"
    assert start(fork_server.Popen, program).communicate(timeout=60)[0] == "False\n"


def test_what_torch_sets_when_it_is_imported_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    program = "import sys; print('torch' in sys.modules)"
    assert start(fork_server.Popen, program).communicate(timeout=60)[0] == "True\n"
