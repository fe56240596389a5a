"""What the pods of a manifest run (`dlctl kubernetes`), with the files of their Secrets.

    python -m dlctl.ops.kubernetes.pod control JOBFILE PREPARED
    python -m dlctl.ops.kubernetes.pod join DIRECTORY -- python PROGRAM...

`control` runs the job in the foreground and invites its workers. Told to end, as before its node is
drained, it kills the daemons if their state is on a disk that outlives the pod, so that the next
pod goes on there; otherwise it stops the run in order. `join` is `dlctl join` with the invitation
of this pod, as soon as there is a run that accepts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from dlctl.control import prepared
from dlctl.control.invitation import SUFFIX
from dlctl.control.prepared import Invited, PreparedRun
from dlctl.errors import DlctlError, NotPermitted, Unreachable
from dlctl.launch import local
from dlctl.ops import control
from dlctl.runs import paths, select
from dlctl.runs.snapshot import Snapshot, load, read_job
from dlctl.util import regular

INDEX = "JOB_COMPLETION_INDEX"
"""Kubernetes numbers the pods of an Indexed Job."""
AWAITED_S = 1800.0
"""A worker waits so long for a run that is not there, as `dlctl join` waits for one that was."""
ADMITTED_S = 120.0
"""And so long for one that does not know its invitation yet."""
LOOK_S = 0.5
TERMINATED = 128 + signal.SIGTERM
DLCTL = (sys.executable, "-P", "-m", "dlctl")


class _Child:
    """A command that gets the signals that this process gets."""

    def __init__(self, argv: list[str], told: Callable[[int], bool] = lambda number: True) -> None:
        """told: whether a signal is passed on."""
        self.was_told = False
        self.process: subprocess.Popen[bytes]
        self._is_started = False
        self._argv, self._told = argv, told
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.start()

    def start(self) -> None:
        """Start it; or again, after its end."""
        self.process = subprocess.Popen(self._argv)
        self._is_started = True
        if self.was_told and self._told(signal.SIGTERM):  # Before it was there.
            self.process.terminate()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.was_told = True
        if self._is_started and self._told(number):
            self.process.send_signal(number)

    def ended(self, wait_s: float) -> int | None:
        """Its exit code as a shell has it; None: it still runs after `wait_s`."""
        try:
            code = self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code


# ---------------------------------------------------------------- the control pod


def lead(file: Path, given: Path) -> int:
    """Run the job of a file; the exit code of this process. Raises DlctlError."""
    private = _private_copy(given)
    made = prepared.load(private)
    os.environ[prepared.VARIABLE] = str(private)
    child = _Child([*DLCTL, "run", "--progress", "plain", str(file)], told=lambda number: False)
    waiting, has_passed, why = list(made.invited), False, ""
    while (code := child.ended(LOOK_S)) is None:
        if child.was_told and _hand_over(file, child):
            return TERMINATED
        if child.was_told and not has_passed:
            has_passed = True
            child.process.terminate()
        if waiting and not child.was_told and (run := _found(file, made)) is not None:
            before = why
            waiting, why = _invited(run, waiting)
            if why not in ("", before):
                _say(why)
    return code


def _found(file: Path, made: PreparedRun) -> Snapshot | None:
    """The prepared run, once its coordinator is there."""
    with suppress(DlctlError):
        run = load(select.directory(str(file), quiet=True))
        if run.run_id == made.run and run.is_live and run.coordinator_pid is not None:
            return run
    return None


def _invited(run: Snapshot, waiting: list[Invited]) -> tuple[list[Invited], str]:
    """Invite workers, in order: each gets the next slot. Returns those that are still to be, and
    why.
    """
    for place, each in enumerate(waiting):
        asked = {"name": each.name, "serial": each.serial, "expires": each.expires}
        try:
            row = control.ask(run, "invite", asked)
        except DlctlError as error:
            return waiting[place:], f"{each.name} is not invited yet: {error}"
        if row["ended"] or row["worker"] != f"worker-{each.slot}":
            why = row["ended"] or f"it would be {row['worker']}"
            _say(f"{each.name} cannot be invited: {why}")
    return [], ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _hand_over(file: Path, child: _Child) -> bool:
    """Kill the daemons of a run whose state outlives this pod. False: it does not."""
    try:
        directory = select.directory(str(file), quiet=True)
        is_kept = bool(read_job(directory)["servers"]["durability"] == "disk")
    except (DlctlError, LookupError, TypeError):
        return False
    if is_kept:
        child.process.kill()
        local.kill_all(directory)
    return is_kept


# ---------------------------------------------------------------- a worker's pod


def join(directory: Path, words: list[str]) -> int:
    """Train in the run; the exit code of this process. Raises DlctlError."""
    index = os.environ.get(INDEX, "0")
    file = _private_copy(directory / f"{index}{SUFFIX}")
    began, first_refused = time.monotonic(), 0.0
    child = _Child([*DLCTL, "join", "--invite", str(file), *words])
    while True:
        while (code := child.ended(LOOK_S)) is None:
            pass
        now = time.monotonic()
        if child.was_told:  # It has left in order, and comes again.
            return TERMINATED
        first_refused = (first_refused or now) if code == NotPermitted.exit_code else 0.0
        is_early = code == Unreachable.exit_code and now < began + AWAITED_S
        is_early |= code == NotPermitted.exit_code and now < first_refused + ADMITTED_S
        if not is_early:
            return code
        time.sleep(LOOK_S)
        if child.was_told:  # While there was none to tell.
            return TERMINATED
        child.start()


def _private_copy(file: Path) -> Path:
    """Of a file of a volume, which its group may read. Raises DlctlError."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"dlctl-pod-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        copy = folder / file.name
        paths.write(copy, regular.read_bytes(file), 0o600)
    except OSError as error:
        raise DlctlError(
            f"cannot copy a file of a Secret: {error.strerror}",
            where=str(file),
            hint="/tmp has to be a volume that can be written",
        ) from error
    return copy


def main(words: list[str]) -> int:
    try:
        match words:
            case ["control", file, given]:
                return lead(Path(file), Path(given))
            case ["join", directory, *command]:
                return join(Path(directory), command)
    except DlctlError as error:
        print(f"error: {error}\n  at: {error.where}", file=sys.stderr)
        return error.exit_code
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
