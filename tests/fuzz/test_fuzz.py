"""A short run of every fuzzing target, always with the same inputs; `make fuzz` takes new ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from . import runner
from .__main__ import main
from .mutation import SIZE_MAX_BYTES
from .parts import join, split
from .runner import Failure, Target, attempt, kept, minimise, run
from .targets import TARGETS

CORPUS_BYTES_MAX = 300_000
CASES = {
    "wire": 600,
    "jobfile": 140,
    "checkpoint": 140,
    "image": 300,
    "journal": 200,
    "logs": 140,
    "kernels": 400,
}
"""About a fifth of a second each; `make fuzz` takes as many as there is time for."""
SEED = 1


def fail(failure: Failure) -> None:
    print(f"{len(failure.data)} bytes: {failure.data[:500]!r}")
    raise failure.error


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_hold_every_property(name: str) -> None:
    for data in TARGETS[name].seeds():
        if failure := attempt(TARGETS[name], data):
            fail(failure)


@pytest.mark.parametrize("name", TARGETS)
def test_what_once_broke_something_does_not_any_more(name: str) -> None:
    for path in kept(name):
        if failure := attempt(TARGETS[name], path.read_bytes()):
            print(path)
            fail(failure)


@pytest.mark.parametrize("name", TARGETS)
def test_many_changed_inputs_break_nothing(name: str) -> None:
    outcome = run(TARGETS[name], SEED, cases=CASES[name])
    assert outcome.cases == CASES[name] or outcome.failure is not None
    if outcome.failure is not None:
        print(f"a shorter input: {sys.executable} -m tests.fuzz --seed {SEED} --only {name}")
        fail(outcome.failure)


def test_the_corpus_is_small_and_belongs_to_targets_that_there_are() -> None:
    files = [path for path in runner.CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} <= set(TARGETS)
    assert sum(path.stat().st_size for path in files) < CORPUS_BYTES_MAX
    assert all(path.stat().st_size <= SIZE_MAX_BYTES for path in files)


def test_the_parts_of_an_input_come_back_whatever_its_bytes_are() -> None:
    parts = [b"", b"a" * 300, b"\0"]
    assert split(join(parts)) == parts
    assert split(join(parts)[:-1]) == [*parts[:2], b""]
    assert split(b"\xff" * 9) == [b"\xff" * 5]
    assert split(b"") == []


# ---------------------------------------------------------------- the harness itself


class Broken:
    """A target with every kind of bug that the harness looks for."""

    NAME = "broken"
    MEMORY_BYTES = 100_000
    MEMORY_PER_BYTE = 10

    def seeds(self) -> list[bytes]:
        return [b"valid"]

    def mutate(self, random: Random, data: bytes, other: bytes) -> bytes:
        return data + b"x" * random.randrange(50)

    def target(self, data: bytes) -> None:
        if b"error" in data:
            raise KeyError(data)
        if b"memory" in data:
            bytearray(1_000_000)
        if b"slow" in data:
            while True:
                pass
        assert len(data) < 50


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(runner, "HANG_CPU_S", 0.05)
    return Broken()


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"an error", KeyError), (b"memory", AssertionError), (b"slow", runner.Hang)],
)
def test_errors_memory_and_endless_loops_are_failures(
    broken: Target, data: bytes, kind: type[BaseException]
) -> None:
    failure = attempt(broken, data)
    assert failure is not None
    assert type(failure.error) is kind
    assert attempt(broken, b"harmless") is None


def test_a_run_ends_at_the_first_failure_and_the_same_seed_finds_it_again(broken: Target) -> None:
    first, again = (run(broken, seed=3, cases=10_000) for _ in range(2))
    assert first.failure is not None
    assert again.failure is not None
    assert (first.cases, first.failure.data) == (again.cases, again.failure.data)
    assert len(first.failure.data) >= 50


def test_a_failing_input_is_made_shorter_as_long_as_it_fails_in_the_same_way(
    broken: Target,
) -> None:
    failure = attempt(broken, b"x" * 30 + b"error" + b"y" * 300)
    assert failure is not None
    shortest = minimise(broken, failure)
    assert shortest.data == b"error"
    assert shortest.is_same(failure)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """Runs `python -m tests.fuzz` with some arguments: its exit code and what it prints."""

    def run_with(*arguments: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["fuzz", *arguments])
        return main(), capsys.readouterr().out.splitlines()

    return run_with


def test_the_command_shows_seed_and_speed_of_each_target(
    command: Callable[..., tuple[int, list[str]]],
) -> None:
    code, (seed, wire, logs) = command("--time", "0.2", "--only", "wire,logs", "--seed", "7")
    assert code == 0
    assert seed.startswith("seed 7,")
    assert [line.split()[0] for line in (wire, logs)] == ["wire", "logs"]
    assert wire.endswith("good")
    assert command("--only", "nothing")[0] == 2


def test_what_breaks_something_is_kept_and_can_be_replayed(
    command: Callable[..., tuple[int, list[str]]],
    broken: Target,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(runner, "CORPUS", tmp_path)
    monkeypatch.setitem(TARGETS, "broken", broken)
    code, (_, summary, said, replay) = command("--time", "5", "--only", "broken")
    assert code == 1
    assert summary.endswith("BROKEN")
    assert said.strip().startswith("AssertionError")
    path = replay.rpartition(" ")[2]
    assert kept("broken") == [Path(path)]
    assert command("--replay", path) == (1, ["BROKEN"])
    Path(path).write_bytes(b"harmless")
    assert command("--replay", path) == (0, ["good"])
    assert command("--replay", path, "--only", "wire") == (0, ["good"])
    assert command("--replay", str(tmp_path / "nothing"))[0] == 2
