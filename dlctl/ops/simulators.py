"""The process that simulates: torch is imported once, however many runs it simulates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.ops import other_process
from dlctl.sim.request import SimulationRequest

Json = dict[str, Any]
MODULE = "daemons.simulator"


class Simulators:
    """Up to `slots` simulations at the same time. Use `opened`."""

    def __init__(self, process: subprocess.Popen[str], where: Path) -> None:
        self._process = process
        self._where = where

    def ask(self, requests: Sequence[SimulationRequest]) -> list[Json]:
        """The answers, in the order of the requests; each may be an error (`error_in`). Raises
        DlctlError if the process has ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            for request in requests:
                stdin.write(json.dumps(request.to_json()) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answers: dict[str, Json] = {}
        for _ in requests:
            line = stdout.readline()
            if not line:
                raise self._ended()
            found = json.loads(line)
            answers[found["directory"]] = found
        return [answers[request.directory] for request in requests]

    def _ended(self) -> DlctlError:
        code = self._process.wait()
        return other_process.error_of("", code, self._where, "the simulator has ended")


def error_in(answer: Json) -> DlctlError | None:
    """What went wrong in a simulation, in the user's code for example; None: it ran."""
    if "error" not in answer:
        return None
    facts = answer["error"]
    error = DlctlError(facts["message"], where=facts["where"], hint=facts["hint"])
    error.exit_code = answer["exit_code"]
    return error


@contextmanager
def opened(slots: int, where: Path) -> Iterator[Simulators]:
    """where: the job file, for errors."""
    argv = [sys.executable, "-P", "-m", MODULE, str(slots)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Simulators(process, where)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
