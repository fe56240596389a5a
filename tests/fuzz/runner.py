"""Running a target: seeds and corpus first, then changed inputs, until time or count is up."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Protocol

from .mutation import SIZE_MAX_BYTES

CORPUS = Path(__file__).parent / "corpus"
CASE_CPU_S_MAX = 1.0
HANG_CPU_S = 20.0
MEASURED_EVERY = 32
"""Of so many cases one is run with its memory measured, which takes several times as long."""
POOL_MAX = 400
MINIMISE_S = 3.0


class Target(Protocol):
    """A module of this package."""

    NAME: str
    MEMORY_BYTES: int
    MEMORY_PER_BYTE: int
    """A case may take `MEMORY_BYTES`, and so many more for each of its bytes."""

    def seeds(self) -> list[bytes]:
        """Valid inputs."""
        ...

    def mutate(self, random: Random, data: bytes, other: bytes) -> bytes:
        """An input made of another one, and of pieces of a third."""
        ...

    def target(self, data: bytes) -> None:
        """Raises only if a property is broken."""
        ...


class Hang(BaseException):
    """No code under test catches it."""


@dataclass(frozen=True, slots=True)
class Failure:
    data: bytes
    error: BaseException

    def is_same(self, other: Failure | None) -> bool:
        return other is not None and _place(self.error) == _place(other.error)


@dataclass(slots=True)
class Outcome:
    target: str
    cases: int = 0
    seconds: float = 0.0
    failure: Failure | None = None


def kept(name: str) -> list[Path]:
    """The files of a target's corpus."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())


def run(
    target: Target, seed: int, seconds: float = float("inf"), cases: int | None = None
) -> Outcome:
    """Try all seeds and the corpus, then changed inputs; ends at the first failure."""
    random = Random(f"{seed} {target.NAME}")
    outcome, begun = Outcome(target.NAME), time.monotonic()
    pool = [*target.seeds(), *(path.read_bytes() for path in kept(target.NAME))]
    for data in _inputs(target, random, pool):
        is_measured = outcome.cases % MEASURED_EVERY == 0
        outcome.cases += 1
        outcome.failure = attempt(target, data, is_measured=is_measured)
        outcome.seconds = time.monotonic() - begun
        is_over = outcome.seconds >= seconds or (cases is not None and outcome.cases >= cases)
        if is_over or outcome.failure is not None:
            break
    return outcome


def _inputs(target: Target, random: Random, first: list[bytes]) -> Iterator[bytes]:
    yield from first
    changed = list(first)
    while True:
        # Mostly from what is valid: what was changed before is refused for that already.
        base = random.choice(first if random.random() < 0.8 else changed)
        data = target.mutate(random, base, random.choice(first))
        if len(data) > SIZE_MAX_BYTES:
            continue
        yield data
        if random.random() < 0.1:
            changed.append(data)
            if len(changed) > len(first) + POOL_MAX:
                del changed[random.randrange(len(first), len(changed))]


def attempt(target: Target, data: bytes, *, is_measured: bool = True) -> Failure | None:
    """One case; what broke, or None."""
    try:
        with _watched():
            (_measure if is_measured else _time)(target, data)
    except (Exception, Hang) as error:
        return Failure(data, error)
    return None


def _time(target: Target, data: bytes) -> None:
    begun = time.thread_time()
    target.target(data)
    took_s = time.thread_time() - begun
    assert took_s < CASE_CPU_S_MAX, f"{len(data)} bytes took {took_s:.1f} s"


def _measure(target: Target, data: bytes) -> None:
    allowed = target.MEMORY_BYTES + target.MEMORY_PER_BYTE * len(data)
    tracemalloc.start()
    try:
        target.target(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= allowed, f"{len(data)} bytes took {peak:,} bytes of memory; {allowed:,} allowed"


@contextmanager
def _watched() -> Iterator[None]:
    """Raises Hang in a case that uses the processor for too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"still not done after {HANG_CPU_S} s of the processor")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# ---------------------------------------------------------------- after a failure


def _place(error: BaseException) -> tuple[str, str]:
    """What broke and where, so that two failures can be told from each other."""
    kind, trace = type(error).__name__, error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, RecursionError | Hang):
        return kind, ""  # They end somewhere else each time.
    return kind, f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def minimise(target: Target, failure: Failure) -> Failure:
    """A shorter input that breaks the same, if one is found in a few seconds."""
    until = time.monotonic() + MINIMISE_S
    size = len(failure.data) // 2
    while size and time.monotonic() < until:
        for at in range(0, len(failure.data), size):
            shorter = failure.data[:at] + failure.data[at + size :]
            found = attempt(target, shorter)
            if failure.is_same(found) and found is not None:
                failure = found
                break
            if time.monotonic() >= until:
                break
        else:
            size //= 2
        size = min(size, len(failure.data) // 2)
    return failure


def keep(target: Target, failure: Failure) -> Path:
    """Write the input into the corpus, where every later run finds it."""
    path = CORPUS / target.NAME / hashlib.sha256(failure.data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(failure.data)
    return path
