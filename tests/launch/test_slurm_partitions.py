"""What `doctor` says of partitions, from Slurm's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl.errors import TimedOut
from dlctl.launch import answers, launcher, slurmpartitions, slurmtrial
from dlctl.launch.answers import CallResult
from dlctl.launch.launcher import Fact
from dlctl.launch.slurmpartitions import Answers, NodeState, Use

IDLE = (NodeState("h1", "idle"), NodeState("h2", "mixed"))
WORKERS = Use("workers", "launcher slurm", "a")
CONTROL = WORKERS._replace(what="control", is_control=True)
JOB = WORKERS._replace(what="the job", nodes=2, is_taken_singly=False)
OK, WARNING, FAULT = "ok", "warning", "fault"


def known(
    nodes: tuple[NodeState, ...] = IDLE,
    *,
    tier: int = 9,
    kind: str = "preempt/partition_prio",
    **row: str,
) -> Answers:
    """A partition "a" and one that precedes it."""
    own = {"PartitionName": "a", "State": "UP", "PreemptMode": "REQUEUE", "PriorityTier": "1"}
    others = {"PartitionName": "b", "State": "UP", "PriorityTier": str(tier), "Default": "YES"}
    return Answers(
        {"a": own | row, "b": others}, {"a": [*nodes], "b": [NodeState("h2", "idle")]}, kind
    )


def marks(use: Use, known: Answers) -> dict[str, str]:
    found = slurmpartitions.verdicts(use, known)
    return {f.subject: FAULT if f.is_fault else WARNING if f.fix else OK for f in found}


def only(subject: str, use: Use, known: Answers) -> Fact:
    (found,) = [f for f in slurmpartitions.verdicts(use, known) if f.subject == subject]
    return found


def test_of_several_partitions_one_has_to_be_there() -> None:
    assert marks(JOB._replace(partition="none,a"), known()) == {}
    assert marks(JOB._replace(partition="none,neither"), known()) == {"partition": FAULT}


def test_a_good_partition_is_good() -> None:
    assert marks(WORKERS, known(GraceTime="30")) == dict.fromkeys(
        ("nodes", "PreemptMode", "GraceTime"), OK
    )
    assert "30 s" in only("GraceTime", WORKERS, known(GraceTime="30")).found
    assert marks(JOB, known()) == {"nodes": OK}


@pytest.mark.parametrize(
    ("use", "made", "subject", "mark", "said"),
    [
        (WORKERS._replace(partition="nope"), known(), "partition", FAULT, "it has a, b"),
        (WORKERS, known(State="DOWN"), "partition", FAULT, "DOWN"),
        (WORKERS, known(State="DRAIN"), "partition", FAULT, "drained"),
        (CONTROL, known(State="INACTIVE"), "partition", FAULT, "INACTIVE"),
        (WORKERS, known(()), "nodes", FAULT, "no nodes"),
        (WORKERS, known((NodeState("h1", "down", "psu"),)), "nodes", FAULT, "h1 is down (psu)"),
        (CONTROL, known((NodeState("h1", "idle*"),)), "nodes", FAULT, "h1 is idle*"),
        (WORKERS, known((NodeState("h1", "drained"), *IDLE)), "nodes", OK, "2 of 3 nodes"),
        (
            JOB,
            known((NodeState("h1", "draining"), NodeState("h2", "idle"))),
            "nodes",
            WARNING,
            "waits for 2",
        ),
        (JOB, known((NodeState("h2", "idle"),)), "nodes", FAULT, "asks for 2"),
        (JOB._replace(minutes=11), known(MaxTime="00:10:00"), "time", FAULT, "11 min"),
        (CONTROL, known(MaxTime="7-00:00:00"), "time", WARNING, "7-00:00:00"),
        (CONTROL, known(DefaultTime="01:00:00", MaxTime="1-00:00:00"), "time", WARNING, "01:00:00"),
        (WORKERS, known(PreemptMode="OFF"), "PreemptMode", OK, "not preempted"),
        (WORKERS, known(tier=1), "PreemptMode", OK, "not preempted"),
        (WORKERS, known((NodeState("h1", "idle"),)), "PreemptMode", OK, "not preempted"),
        (WORKERS, known(kind="preempt/none"), "PreemptMode", OK, "not preempted"),
        (WORKERS, known(kind="preempt/qos"), "PreemptMode", OK, "quality of service"),
        (WORKERS, known(PreemptMode="GANG,SUSPEND"), "PreemptMode", WARNING, "suspended"),
        (CONTROL, known(), "PreemptMode", WARNING, "whole run"),
        (CONTROL, known(PreemptMode="OFF"), "PreemptMode", OK, "not preempted"),
    ],
)
def test_what_is_wrong_with_a_partition_is_said(
    use: Use, made: Answers, subject: str, mark: str, said: str
) -> None:
    assert marks(use, made)[subject] == mark
    assert said in only(subject, use, made).found


@pytest.mark.parametrize(
    ("use", "made"),
    [
        (JOB._replace(minutes=10), known(MaxTime="00:10:00")),
        (CONTROL._replace(minutes=60), known(MaxTime="01:00:00")),
        (WORKERS, known(MaxTime="01:00:00")),
        (CONTROL, known(MaxTime="UNLIMITED", DefaultTime="NONE")),
    ],
)
def test_a_time_limit_that_fits_is_not_mentioned(use: Use, made: Answers) -> None:
    assert "time" not in marks(use, made)


def test_without_a_name_it_is_the_default() -> None:
    default = WORKERS._replace(partition="")
    assert "partition b" in only("nodes", default, known()).found
    assert marks(default, Answers({"a": {"PartitionName": "a"}}, {})) == {"partition": FAULT}
    assert marks(WORKERS, Answers({}, {})) == {}, "Slurm does not answer, which is said elsewhere"


def put(tools: Path, name: str, text: str) -> None:
    path = tools / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_slurm_is_asked_for_both_partitions(tools: Path) -> None:
    put(
        tools,
        "scontrol",
        'case "$*" in *config) echo "PreemptType = preempt/partition_prio";; *)\n'
        "echo PartitionName=a PriorityTier=1 PreemptMode=CANCEL GraceTime=5 State=UP\n"
        "echo PartitionName=b PriorityTier=2 PreemptMode=OFF State=DOWN;; esac",
    )
    put(tools, "sinfo", "echo 'a|h1|idle|none'; echo 'b|h1|down|a | b'")
    options = {"nodes": 1, "jobs": "each", "partition": "a", "control": {"partition": "b"}}
    facts = list(launcher.made("slurm", options).facts())
    assert [f.subject for f in facts if f.is_fault] == ["partition", "nodes"]
    assert "h1 is down (a | b)" in facts[-2].found
    assert any("CANCEL" in f.found for f in facts)
    put(tools, "scontrol", "exit 1")
    assert not list(launcher.made("slurm", options).facts())


def test_no_free_node_is_no_fault_of_the_job(tools: Path) -> None:
    put(tools, "scontrol", "echo PartitionName=a Default=YES")
    put(tools, "sinfo", "echo 'a|h1|allocated|none'; echo 'a|h2|down|psu'")
    with pytest.raises(TimedOut):
        launcher.made("slurm", {"nodes": 1}).trial()
    put(tools, "sinfo", 'for n in 1 2 3; do echo "a|h$n|idle|none"; done')
    put(tools, "srun", "echo srun: error: Unable to allocate resources: busy >&2; exit 1")
    sessions = launcher.made("slurm", {"nodes": 3}).trial()
    assert [each.host for each in sessions] == ["h1", "h2"]
    for each in sessions:
        with pytest.raises(TimedOut, match="busy"):
            each.ask({"verb": "hello"}, 10.0)
        each.close()


def test_what_fails_on_a_node_that_was_given_is_another_thing() -> None:
    failed = CallResult("h1", None, answers.NOT_FOUND, "slurmstepd: error: execve(): python")
    error = slurmtrial.explained(failed)
    assert not isinstance(error, TimedOut)
    assert "python" in str(error.hint)
