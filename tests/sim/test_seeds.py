"""Some seeds of each scenario, every time: small runs in bad circumstances keep every promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scenarios import SCENARIOS
from seeds import PER_COMMIT, examine, summarise

PUSHES_MIN, FAULTS_MIN = 24, 3
"""Of every run, or in the mean over runs that may be stopped soon, or have no servers."""
IN_THE_MEAN = ("stops", "toys", "liars")
EXCUSED_MAX = 0.1
"""Of the runs of a scenario: those that have ended for want of room before they had begun."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def test_they_are_as_many_as_the_documents_say():
    assert PER_COMMIT.keys() == SCENARIOS.keys()
    (count,) = re.findall(r"(\d+) seeds per commit", (ROOT / "RELIABILITY.md").read_text())
    assert sum(PER_COMMIT.values()) == int(count)


@pytest.mark.per_commit(len(SCENARIOS))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_seed_keeps_every_promise(scenario, capsys):
    count = PER_COMMIT[scenario]
    summary = summarise(scenario, range(count))
    with capsys.disabled():
        print(f"\nseeds 0..{count - 1} of {scenario}: {summary}")
    assert not summary.failures, str(summary)
    assert summary.runs[scenario] == count
    assert summary.without_room <= EXCUSED_MAX * count
    if scenario in IN_THE_MEAN:
        least = (summary.pushes / count, summary.faults / count)
    else:
        least = (summary.fewest_pushes, summary.fewest_faults)
    assert least[0] >= (0 if scenario == "serverless" else PUSHES_MIN)
    assert least[1] >= FAULTS_MIN


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_replay_prints_the_same_bytes_in_every_process(scenario):
    """Also where Python orders its sets in another way."""

    def replay(hash_seed: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "replay.py"), scenario, "5"]
        surroundings = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, env=surroundings)

    processes = [replay(hash_seed) for hash_seed in (1, 2)]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first == second
    result, trace = examine(scenario, 5)
    assert first.decode().startswith("\n".join(trace))
    assert result.digest in first.decode()


def test_a_failing_seed_names_the_command_that_shows_it():
    """A command with a mutant switched on: what was found, and an exit code that says so."""
    command = [sys.executable, str(HERE / "replay.py"), "downpour", "1", "--quiet"]
    ended = subprocess.run([*command, "--mutant", "no-dedupe"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.search(r"^(Ledger|Staleness)Checker: ", ended.stdout, re.MULTILINE)
    result, _ = examine("downpour", 0)
    assert result.replay == "python tests/sim/replay.py downpour 0"
