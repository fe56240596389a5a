"""The section [launcher] of a job file and its older forms: what they mean, and what is refused,
with its line.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from dlctl import jobfile, registry
from dlctl.job import config
from dlctl.job.placement import agents, place
from dlctl.ops import changes
from dlctl.runs.snapshot import read_job

JOB = """[job]
name = "spread"
task = "train.py:task"

[servers]
count = 2
[workers]
count = 4
"""
FIRST_LINE = 1 + JOB.count("\n")
SLURM = '[launcher]\nname = "slurm"\n'
BOXES = '[launcher]\nname = "{}"\nboxes = 2\ndirectory = "/boxes"\n'


@pytest.fixture
def load(tmp_path: Path):
    (tmp_path / "train.py").write_text("task = None\n")

    def load_text(text: str) -> config.JobFile:
        file = tmp_path / "job.toml"
        file.write_text(JOB + text)
        return jobfile.load(file)

    return load_text


@pytest.fixture
def problems(load):
    def found(text: str) -> list[jobfile.JobFileProblem]:
        with pytest.raises(jobfile.JobFileError) as refused:
            load(text)
        return refused.value.problems

    return found


# ---------------------------------------------------------------- what they mean


def test_a_job_on_three_nodes_has_an_agent_on_each_and_one_here(load):
    job = load(f'{SLURM}nodes = 3\npartition = "dl"\ntime = "2h"\nextra = ["--exclusive"]\n')
    assert job.has_other_hosts
    assert job.is_encrypted
    hosts = agents(job.places)
    assert {name: host.is_other for name, host in hosts.items()} == {
        "agent-0": False, "agent-1": True, "agent-2": True, "agent-3": True,
    }  # fmt: skip
    assert set(place(job).values()) == {"agent-1", "agent-2", "agent-3"}
    assert config.of_stored(config.to_dict(job)) == job


@pytest.mark.parametrize(
    ("older", "section"),
    [
        ("", '[launcher]\nname = "local"\n'),
        ("[[hosts]]\nworkers = 4\n", '[launcher]\nname = "local"\n'),
        ('[[hosts]]\nssh = "h1"\n', '[launcher]\nname = "ssh"\n'),
        ('[slurm]\nnodes = 2\ntime = "2h"\n', f'{SLURM}nodes = 2\ntime = "2h"\n'),
        ('[toy-boxes]\nboxes = 2\ndirectory = "/boxes"\n', BOXES.format("toy-boxes")),
    ],
)
def test_an_older_form_means_the_same_as_the_section(load, older: str, section: str):
    hosts = older if older.startswith("[[hosts]]") else ""
    assert load(older) == load(section + hosts)


def test_a_stored_job_of_an_earlier_version_is_read_in_todays_form(load, tmp_path):
    for text in ("", '[[hosts]]\nssh = "h1"\n', f"{SLURM}nodes = 2\nqueue_s = 5.0\n"):
        job = load(text)
        stored = config.to_dict(job)
        launcher = stored.pop("launcher")
        stored["slurm"] = launcher["options"] if launcher["name"] == "slurm" else {"nodes": 0}
        assert config.of_stored(stored) == job
        (tmp_path / "job.json").write_text(json.dumps(stored))
        now = json.loads(json.dumps(config.to_dict(job)))
        assert changes.differences(read_job(tmp_path), now) == []


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("head", [SLURM, "[slurm]\n"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nodes = 0", "must be >= 1"),
        ('nodes = "3"', "must be a whole number"),
        ("nodes = 2\nnode = 3", "unknown key"),
        ('nodes = 2\ntime = "2"', "needs a number and a unit"),
        ('nodes = 2\ntime = "0s"', "must be above zero"),
        ('nodes = 2\ntime = "2m"', "must be more than notice_s (120 s)"),
        ('nodes = 2\npartition = "a b"', "must be the name of a partition"),
        ('nodes = 2\npartition = "a\\n#SBATCH --uid=0"', "must be the name of a partition"),
        ('nodes = 2\nmemory = "16 GB"', "must be a number with K, M, G or T"),
        ('nodes = 2\ndir = "here"', "must be a full path"),
        ('nodes = 2\nscratch = "/a\\nb"', "must be a full path on the nodes"),
        ('nodes = 2\nextra = ["-x"]', "must be a long option of sbatch"),
        ('nodes = 2\nextra = ["--a=\\nb"]', "must be a long option of sbatch"),
        ('nodes = 2\nextra = ["--nodes=7"]', "--nodes is dlctl's own"),
        ("nodes = 2\nnotice_s = -1", "must be >= 0"),
    ],
)
def test_a_wrong_option_is_told_with_its_line_in_either_form(problems, head, line, said):
    text = f"{head}{line}\n"
    (found,) = problems(text)
    assert said in found.message
    assert found.line == FIRST_LINE + text.count("\n") - 1
    assert found.key.startswith("slurm." if head == "[slurm]\n" else "launcher.")


@pytest.mark.parametrize(
    ("text", "line", "key", "suggestion"),
    [
        ('[launcher]\nname = "slrum"\n', 1, "launcher.name", 'did you mean "slurm"?'),
        ('[launcher]\nname = "toy-boxs"\n', 1, "launcher.name", 'did you mean "toy-boxes"?'),
        ("[launcher]\nnodes = 2\n", 0, "launcher.name", "known: local, ssh, slurm"),
        (f'{SLURM}nodes = 2\npartitoin = "dl"\n', 3, "launcher.partitoin", '"partition"?'),
        ("[slrum]\nnodes = 2\n", 0, "slrum", 'did you mean "slurm"?'),
        ('[slurm]\npartition = "dl"\n', 0, "slurm.nodes", ""),
        ('[slurm]\nname = "slurm"\nnodes = 2\n', 1, "slurm.name", ""),
        (BOXES.format("toy-boxes").replace("/boxes", "boxes"), 3, "launcher.directory", ""),
        (f'{SLURM}nodes = 2\n[network]\nencryption = "none"\n', 4, "network.encryption", "curve"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_a_suggestion(
    problems, text: str, line: int, key: str, suggestion: str
):
    (found,) = problems(text)
    assert (found.key, found.line) == (key, FIRST_LINE + line)
    assert suggestion in found.suggestion


def test_of_two_forms_of_one_section_each_is_named(problems):
    found = problems(f"[slurm]\nnodes = 2\n{SLURM}nodes = 3\n")
    assert [(p.key, p.line) for p in found] == [("slurm", FIRST_LINE)]
    found = problems('[slurm]\nnodes = 2\n[toy-boxes]\nboxes = 2\ndirectory = "/boxes"\n')
    assert {"slurm", "toy-boxes"} <= {p.key for p in found}


def test_hosts_are_listed_for_a_launcher_that_takes_them_and_for_no_other(problems, load):
    host = '[[hosts]]\nssh = "h1"\n'
    assert load(f'[launcher]\nname = "ssh"\n{host}').launcher.name == "ssh"
    for name, keys in (
        ("slurm", "nodes = 2\n"),
        ("local", ""),
        ("toy-boxes", BOXES.partition('}"\n')[2]),
    ):
        (found,) = problems(f'[launcher]\nname = "{name}"\n{keys}{host}')
        assert (found.key, found.line) == ("launcher.name", FIRST_LINE + 1)
        assert "ssh" in found.suggestion
    (found,) = problems(f"[slurm]\nnodes = 2\n{host}")
    assert (found.key, found.line) == ("slurm", FIRST_LINE)
    (found,) = problems('[launcher]\nname = "ssh"\n[[hosts]]\nworkers = 4\n')
    assert "[[hosts]]" in found.suggestion


def test_state_in_processes_alone_needs_a_launcher_whose_processes_outlive_the_coordinator(
    problems, load, tmp_path
):
    assert load(BOXES.format("toy-tied")).launcher.name == "toy-tied", "files have the shards"
    none = JOB.replace("count = 2\n", 'count = 2\ndurability = "none"\n')
    for text in (none, JOB.replace("count = 2", "count = 0") + '[algorithm]\nname = "gossip"\n'):
        (tmp_path / "job.toml").write_text(text + BOXES.format("toy-boxes"))
        jobfile.load(tmp_path / "job.toml")
        (tmp_path / "job.toml").write_text(text + BOXES.format("toy-tied"))
        with pytest.raises(jobfile.JobFileError) as refused:
            jobfile.load(tmp_path / "job.toml")
        (found,) = refused.value.problems
        assert (found.key, found.line) == ("launcher.name", text.count("\n") + 2)
        assert {"local", "ssh", "slurm", "toy-boxes"} <= {*re.findall(r"[\w-]+", found.suggestion)}
        assert "toy-tied" not in found.suggestion


def test_a_change_of_the_section_is_one_change_of_the_key_that_was_written(load):
    before, after = (config.to_dict(load(f"{SLURM}nodes = {n}\n")) for n in (2, 3))
    (change,) = changes.differences(before, after)
    assert change[:3] == ("launcher.nodes", 2, 3)


def test_quotes_around_a_whole_value_are_doubted(load):
    text = f"{SLURM}nodes = 2\nextra = ['--comment=\"two words\"']\n"
    (warning,) = jobfile.warnings(load(text))
    assert "--comment=" in warning
    assert jobfile.warnings(load(text.replace('"t', "t").replace('s"', "s"))) == []


def test_hosts_that_may_be_taken_back_without_a_checkpoint_are_doubted(load):
    never = "[checkpoints]\nevery_s = 0.0\n"
    (warning,) = jobfile.warnings(load(f"{SLURM}nodes = 2\n{never}"))
    assert "every_s" in warning
    assert jobfile.warnings(load(f'[[hosts]]\nssh = "h1"\n{never}')) == []


# ---------------------------------------------------------------- broken packages


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install another package with a launcher "theirs" of this source."""

    def installed(source: str) -> None:
        (tmp_path / "theirs_1.py").write_text(source)
        info = tmp_path / "theirs-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text("[dlctl.launchers]\ntheirs = theirs_1:Theirs\n")
        monkeypatch.syspath_prepend(tmp_path)
        registry._third_party.cache_clear()

    yield installed
    sys.modules.pop("theirs_1", None)
    monkeypatch.undo()
    registry._third_party.cache_clear()


WHOLE = """
from dataclasses import dataclass
from dlctl.launch.reached import Reached

@dataclass
class Options:
    pass

class Theirs(Reached):
    Options = Options
    title = noun = "theirs"
    takes_hosts = True
    is_reclaimed = False
    def command(self, host, *, is_shared):
        return []
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module\n", "ModuleNotFoundError"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("def (\n", "SyntaxError"),
        ("Other = 1\n", "AttributeError"),
        ("Theirs = 3\n", "no subclass of dlctl.launch.launcher.Launcher"),
        (WHOLE.replace("takes_hosts = True", ""), "does not declare takes_hosts"),
        (WHOLE.replace('title = noun = "theirs"', ""), "does not declare title, noun"),
        (WHOLE.replace("def command", "def commands"), "does not declare command"),
        (WHOLE.replace("Reached", "Launcher").replace("reached", "launcher"), "agents, end"),
    ],
)
def test_a_package_whose_launcher_cannot_be_used_is_named_with_the_line(
    install, problems, load, source: str, said: str
):
    install(source)
    host = '[[hosts]]\nssh = "h1"\n'
    (found,) = problems(f'[launcher]\nname = "theirs"\n{host}')
    assert (found.key, found.line) == ("launcher.name", FIRST_LINE + 1)
    assert "theirs 2.5" in found.message
    assert said in found.message
    assert load(host).launcher.name == "ssh", "nobody else is disturbed"


def test_the_same_launcher_with_all_its_declarations_is_taken(install, load):
    install(WHOLE)
    job = load('[launcher]\nname = "theirs"\n[[hosts]]\nssh = "h1"\n')
    assert (job.launcher.name, len(job.places)) == ("theirs", 1)
