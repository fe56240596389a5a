"""[[parties]] of a job file: what follows from them, and every mistake at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.job import parties, placement
from dlctl.job.config import JobFile, from_dict, to_dict
from dlctl.jobfile import JobFileError
from dlctl.model import parts

HEAD = '[job]\nname = "s"\n[algorithm]\nname = "split"\n'
CLINIC = '[[parties]]\nname = "clinic"\nrole = "client"\ntask = "a/train.py:task"\nhost = "local"\n'
LAB = '[[parties]]\nname = "lab"\nrole = "head"\ntask = "b/train.py:task"\nhost = "local"\n'
AVERAGE = "[average]\nema = 0.9\nevaluate = true\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text("raise SystemExit('nothing is run here')\n")
    return tmp_path


def load(folder: Path, text: str) -> JobFile:
    file = folder / "job.toml"
    file.write_text(text)
    return jobfile.load(file)


def problem(folder: Path, text: str) -> jobfile.JobFileProblem:
    """The only one."""
    with pytest.raises(JobFileError) as caught:
        load(folder, text)
    (found,) = caught.value.problems
    assert "dlctl validate" in caught.value.message
    return found


def test_own_steps_without_rounds_are_refused_with_the_option_that_makes_some(folder):
    with pytest.raises(JobFileError) as caught:
        load(folder, HEAD + '[inner]\nname = "sgd"\n' + CLINIC + LAB)
    (found,) = (each for each in caught.value.problems if each.key == "inner.name")
    assert "make no steps of their own" in found.message
    assert "local_steps = 2" in found.suggestion


def test_workers_and_servers_follow_from_the_parties(folder):
    twice = CLINIC + "workers = 2\n"
    other = twice.replace("clinic", "ward").replace("a/", "c/").replace("workers = 2\n", "")
    job = load(folder, HEAD + LAB + twice + other)
    assert (job.workers.count, job.servers.count) == (4, 2)
    assert [party.name for party in parties.workers(job.parties)] == [
        "clinic", "clinic", "ward", "lab",
    ]  # fmt: skip
    division = parts.of_job(job)
    assert (division.without_data, division.asked_by(1), division.asked_by(3)) == ({3}, 3, -1)
    tasks = [parties.job_of(job, slot).job.task for slot in range(4)]
    assert [Path(task).parent.name for task in tasks] == ["a", "a", "c", "b"]
    assert division.slots_of(0, range(4)) == (0, 1, 2)
    assert division.slots_of(1, range(4)) == (3,)
    assert [division.initialises(slot) for slot in range(4)] == [True, False, False, True]
    assert from_dict(JobFile, to_dict(job)) == job


def test_daemons_run_on_the_hosts_of_their_parties(folder):
    hosts = '[[hosts]]\nssh = "gpu1"\n[[hosts]]\n'
    away = LAB.replace("local", "gpu1")
    job = load(folder, HEAD + hosts + CLINIC + away)
    assert placement.place(job) == {
        "server-0": "agent-0", "server-1": "agent-1", "worker-0": "agent-0", "worker-1": "agent-1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key", "line", "word"),
    [
        (LAB + CLINIC.replace('"clinic"', '"lab"'), "parties.1.name", 11, "share"),
        (CLINIC.replace('host = "local"\n', "") + LAB, "parties.0.host", 5, "no host"),
        (CLINIC.replace("local", "gpu9") + LAB, "parties.0.host", 9, "none of"),
        (LAB, "parties.0", 5, "without clients"),
        (CLINIC, "parties.0", 5, "without a head"),
        (CLINIC + LAB + LAB.replace('"lab"', '"x"'), "parties.1.role", 12, "heads"),
        (CLINIC + LAB + "workers = 2\n", "parties.1.workers", 15, "one worker"),
        (CLINIC.replace("a/train", "a/trian") + LAB, "parties.0.task", 8, "no file"),
        (CLINIC + LAB + "[workers]\ncount = 3\n", "workers.count", 16, "not written here"),
        (CLINIC + LAB + "[servers]\ncount = 3\n", "servers.count", 16, "not written here"),
        (CLINIC + LAB + "[gradient]\naccumulate = 2\n", "gradient.accumulate", 16, "every batch"),
        (CLINIC + LAB + '[servers]\nplacement = "workers"\n', "servers.placement", 16, "each side"),
        (CLINIC + LAB + AVERAGE, "average.evaluate", 17, "current"),
        (CLINIC + LAB + "[workers]\nmax = 9\n", "workers.max", 16, "connect"),
        (CLINIC + LAB + '[compression]\nname = "topk"\n', "compression.name", 16, "topk"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_line_and_what_to_do(folder, text, key, line, word):
    with pytest.raises(JobFileError) as caught:
        load(folder, HEAD + text)
    found = next(each for each in caught.value.problems if each.key == key)
    assert (found.line, word in found.message, bool(found.suggestion)) == (line, True, True)


def test_a_role_that_is_no_text_is_a_mistake_as_well(folder):
    with pytest.raises(JobFileError) as caught:
        load(folder, HEAD + CLINIC + LAB.replace('"head"', '["head"]'))
    assert "parties.1.role" in {each.key for each in caught.value.problems}


def test_the_head_s_machine_must_not_store_the_clients_parameters(folder):
    hosts = '[[hosts]]\nssh = "gpu1"\n[[hosts]]\n'
    found = problem(folder, HEAD + hosts + CLINIC.replace("local", "gpu1") + LAB)
    assert found.key == "parties.1.host"
    assert "checkpoints" in found.message


@pytest.mark.parametrize(("task", "is_wrong"), [("train.py", True), ("b/train.py", False)])
def test_a_folder_that_holds_another_party_s_is_not_copied_to_its_host(folder, task, is_wrong):
    (folder / "train.py").touch()
    lab = LAB.replace("b/train.py", task)
    assert load(folder, HEAD + CLINIC + lab), "on one machine nothing is copied"
    text = HEAD + '[[hosts]]\nssh = "gpu1"\n[[hosts]]\n' + CLINIC + lab.replace("local", "gpu1")
    if not is_wrong:
        assert load(folder, text)
        return
    found = problem(folder, text)
    assert (found.key, "clinic" in found.message) == ("parties.1.task", True)


def test_another_method_has_no_parties(folder):
    found = problem(folder, HEAD.replace("split", "downpour") + CLINIC + LAB)
    assert (found.key, "split" in found.suggestion) == ("parties", True)


def test_the_method_needs_parties(folder):
    (folder / "train.py").touch()
    found = problem(folder, HEAD.replace('"s"\n', '"s"\ntask = "train.py:task"\n'))
    assert (found.key, "[[parties]]" in found.suggestion) == ("algorithm.name", True)


def test_a_batch_that_is_too_small_for_a_distance_correlation_is_refused(folder):
    small = CLINIC + LAB + "[workers]\nbatch_size = 3\n"
    assert load(folder, HEAD + small)
    with pytest.raises(JobFileError) as caught:
        load(folder, HEAD + "alpha = 0.5\n" + small)
    found = {each.key: each.message for each in caught.value.problems}
    assert "correlation" in found["workers.batch_size"]


def test_a_negative_alpha_is_refused(folder):
    found = problem(folder, HEAD + "alpha = -0.5\n" + CLINIC + LAB)
    assert found.key == "algorithm.alpha"
