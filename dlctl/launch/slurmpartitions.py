"""What `dlctl doctor` says of the partitions of a job: whether jobs start there, for how long, and
whether they are preempted.

`verdicts` knows everything from Slurm's answers (`Answers`); `known` asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from dlctl.launch import commands, slurmcalls, slurmwords
from dlctl.launch.launcher import Fact
from dlctl.util.text import plural

Row = Mapping[str, str]
SHOWN_MAX = 4
"""Nodes, or partitions, that a sentence names."""
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval", "maint", "future", "perfctrs")
_SILENT = "*"
"""Behind the state of a node that does not answer."""
_STATES = {
    "DOWN": "is DOWN: jobs are queued there, and none starts",
    "DRAIN": "is drained: it takes no jobs",
    "INACTIVE": "is INACTIVE: it takes no jobs, and starts none",
}
_MODES = {
    "REQUEUE": "a preempted job is queued again",
    "CANCEL": "a preempted job ends, and is submitted again",
}
_OTHERS = "sinfo -s lists the partitions"


class Use(NamedTuple):
    """A partition that the job file names, and what for."""

    what: str
    """For people: "workers"."""
    section: str
    """Of the job file, for people: its keys are `partition` and `time`."""
    partition: str = ""
    """"": Slurm's default."""
    nodes: int = 1
    minutes: int = 0
    """The time limit of the job; 0: none is given."""
    is_control: bool = False
    """The coordinator and servers are there: best nobody takes that away."""
    is_taken_singly: bool = True
    """A preempted node is no loss of the others."""


class NodeState(NamedTuple):
    name: str
    state: str
    """As sinfo writes it: "idle", "down*"."""
    reason: str = ""

    @property
    def is_usable(self) -> bool:
        return not self.state.startswith(_UNUSABLE) and not self.state.endswith(_SILENT)

    @property
    def is_free(self) -> bool:
        """Whether a job may start there now."""
        return self.is_usable and self.state.rstrip("~#!%$@^-+") in ("idle", "mixed")

    def in_words(self) -> str:
        return f"{self.name} is {self.state}" + (f" ({self.reason})" if self.reason else "")


class Answers(NamedTuple):
    """Slurm's answers."""

    partitions: dict[str, Row]
    """Name -> the fields of `scontrol show partition`."""
    nodes: dict[str, list[NodeState]]
    """Partition -> its nodes."""
    preempt_type: str = ""
    """"": Slurm does not say."""

    def find(self, partition: str) -> Row | None:
        """The first one that is there of "a,b"; "": Slurm's default."""
        if partition:
            found = map(self.partitions.get, partition.split(","))
            return next((row for row in found if row is not None), None)
        return next((r for r in self.partitions.values() if r.get("Default") == "YES"), None)

    def is_preempted(self, row: Row) -> bool | None:
        """Whether its jobs can be; None: that depends on more than the partition."""
        if row.get("PreemptMode") == "OFF" or self.preempt_type == "preempt/none":
            return False
        if self.preempt_type != "preempt/partition_prio":
            return None
        own = {node.name for node in self.nodes.get(row["PartitionName"], ())}
        return any(
            _number(other, "PriorityTier") > _number(row, "PriorityTier")
            and own & {node.name for node in self.nodes.get(name, ())}
            for name, other in self.partitions.items()
        )


def _number(row: Row, key: str) -> int:
    text = row.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() else 0


# ---------------------------------------------------------------- the verdicts


def verdicts(use: Use, known: Answers) -> Iterator[Fact]:
    """Nothing if Slurm says nothing of its partitions."""
    if not known.partitions:
        return
    row = known.find(use.partition)
    if row is None:
        named = f"no partition {use.partition}" if use.partition else "no default partition"
        text = f"{use.what}: Slurm has {named}; it has {_some(known.partitions)}"
        yield Fact("partition", text, f"set {_key(use)} to one of the cluster; {_OTHERS}", True)
        return
    if "," in use.partition:
        return  # Slurm takes the one in which the job starts first.
    where = f"{use.what}, partition {row['PartitionName']}"
    state = row.get("State", "UP")
    if state != "UP":
        text = f"{where} {_STATES.get(state, f'is {state}')}"
        yield Fact("partition", text, _other(use), True)
    yield _of_nodes(where, use, known.nodes.get(row["PartitionName"], []))
    yield from _of_time(where, use, row)
    yield from _of_preemption(where, use, row, known.is_preempted(row))


def _other(use: Use) -> str:
    return f"set {_key(use)} to another one ({_OTHERS}), or ask its administrators"


def _key(use: Use) -> str:
    return f"partition of {use.section}"


def _some(names: Iterable[str]) -> str:
    found = [*names]
    more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
    return f"{', '.join(found[:SHOWN_MAX])}{more}"


def _of_nodes(where: str, use: Use, nodes: list[NodeState]) -> Fact:
    if not nodes:
        return Fact("nodes", f"{where} has no nodes", _other(use), True)
    usable = [node for node in nodes if node.is_usable]
    gone = _some(node.in_words() for node in nodes if not node.is_usable)
    if not usable:
        text = f"{where}: none of its nodes can be used: {gone}"
        return Fact("nodes", text, _other(use), True)
    text = f"{where}: {len(usable)} of {plural(len(nodes), 'node')} can be used"
    text += f": {gone}" if gone else ""
    if len(nodes) < use.nodes:
        fix = f"lower nodes of {slurmwords.WHERE}, or {_other(use)}"
        return Fact("nodes", f"{text}, and the job asks for {use.nodes}", fix, True)
    if len(usable) < use.nodes:
        text = f"{text}; the job waits for {use.nodes}"
        return Fact("nodes", text, f"lower nodes of {slurmwords.WHERE}, or {_other(use)}")
    return Fact("nodes", text)


def _of_time(where: str, use: Use, row: Row) -> Iterator[Fact]:
    most, default = (slurmwords.seconds(row.get(key, "")) for key in ("MaxTime", "DefaultTime"))
    limit_s, key = (default, "DefaultTime") if default is not None else (most, "MaxTime")
    if most is not None and use.minutes * 60 > most:
        text = f"{where} ends jobs after {row['MaxTime']}, and the job asks for {use.minutes} min"
        yield Fact("time", text, f"lower time of {use.section}", True)
    elif use.is_control and not use.minutes and limit_s is not None:
        text = f"{where} ends jobs after {row[key]}: without a time no next job takes over then"
        yield Fact("time", text, f"set time of {use.section}, to at most that")


def _of_preemption(where: str, use: Use, row: Row, is_preempted: bool | None) -> Iterator[Fact]:
    mode, grace = row.get("PreemptMode", ""), row.get("GraceTime", "")
    if not mode or not use.is_taken_singly:
        return
    if is_preempted is False:
        why = "" if mode == "OFF" else ", but no partition that precedes it has its nodes"
        yield Fact("PreemptMode", f"{where}: {mode}{why}: jobs are not preempted")
        return
    maybe = "" if is_preempted else ", if its quality of service may be"
    what = _MODES.get(mode, "jobs are suspended")
    text = f"{where}: {mode}: {what}{maybe}"
    fix = "" if mode in _MODES else "a suspended worker is lost to the run until it returns"
    if use.is_control and is_preempted:
        text += ": the whole run waits for that"
        fix = f"set {_key(use)} to a partition whose jobs are not preempted"
    yield Fact("PreemptMode", text, fix)
    if grace.isdecimal() and not use.is_control:
        words = f"{grace} s for the workers to leave in order"
        words = words if int(grace) else "0 s: workers are killed in the middle of a step"
        yield Fact("GraceTime", f"{where}: {words}")


# ---------------------------------------------------------------- Slurm's answers


def known() -> Answers:
    """Raises DlctlError if Slurm's commands cannot be run."""
    rows = [slurmwords.fields(line) for line in _said("scontrol", "-a", "-o", "show", "partition")]
    nodes: dict[str, list[NodeState]] = {}
    for line in _said("sinfo", "-a", "-h", "-N", "-o", "%R|%N|%T|%E"):
        partition, name, state, reason = [*line.strip().split("|", 3), "", "", ""][:4]
        node = NodeState(name, state.lower(), "" if reason == "none" else reason)
        nodes.setdefault(partition, []).append(node)
    config = dict(line.split("=", 1) for line in _said("scontrol", "show", "config") if "=" in line)
    kind = {key.strip(): value.strip() for key, value in config.items()}.get("PreemptType", "")
    return Answers(
        {row["PartitionName"]: row for row in rows if "PartitionName" in row}, nodes, kind
    )


def _said(*argv: str) -> list[str]:
    """The lines of its output; none if the command fails."""
    try:
        output = commands.wait(argv, slurmcalls.COMMAND_S, slurmcalls.environment())
    except OSError as error:
        raise slurmwords.not_run(error) from error
    return output.out.splitlines() if output.status == 0 else []
