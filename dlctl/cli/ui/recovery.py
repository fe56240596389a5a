"""The findings of `dlctl recover`, a key and a value in each line."""

from __future__ import annotations

from collections.abc import Iterator

from dlctl.cli.ui import console
from dlctl.ops import cases, problems
from dlctl.ops.cases import Case
from dlctl.ops.decide import Action, Shards
from dlctl.util import values

RESULTS = {
    Action.GO_ON: "it resumes where it stopped: nothing is lost",
    Action.RESUME: "it resumes from the checkpoint",
    Action.ALREADY_RUNNING: "its coordinator is running: nothing to recover",
    Action.OVER: "it has ended normally: nothing to recover",
    Action.REFUSE_SILENT: "its coordinator does not answer",
    Action.REFUSE_KEPT: "no good checkpoint to roll back to; all of its progress survives",
    Action.REFUSE_NOTHING: "nothing is left to resume from",
    Action.WAIT_FOR_HOSTS: "it waits for its hosts",
}
ACTS = (Action.GO_ON, Action.RESUME)


def lines(case: Case, *, dry_run: bool) -> list[str]:
    """Escaped. Includes the next command if this one does nothing."""
    assert case.run is not None
    plain = [f"{case.run.run_id}  {case.run.state}"]
    plain += [f"  {key:<10}  {value}" for key, value in _rows(case)]
    shown = [console.escape(line) for line in plain]
    if case.action is Action.OVER or (dry_run and case.action in ACTS):
        shown.append(console.next_lines(cases.next_command(case), "  ", "next        "))
    return shown


def _rows(case: Case) -> Iterator[tuple[str, str]]:
    findings, checkpoint = case.findings, case.checkpoint
    saved = {}
    if case.run is not None and findings is not None:
        yield from (("cause", cause) for cause in problems.lines(case.run))
        yield "alive", ", ".join(findings.living) or "none"
    if case.run is not None and checkpoint is not None:
        path, data = checkpoint
        at = values.ago(data["at"], case.run.now)
        yield "checkpoint", f"step {values.count(data['step'])}, {at}, {values.path(path)}"
        saved = {part["name"]: part["state"].get("version") for part in data["shards"]}
    yield from (("damaged", problem) for problem in case.damaged)
    for shard in findings.shards if findings is not None else ():
        state = "alive" if shard.alive else shard.problem or ("stored" if shard.path else "empty")
        at_least = "" if shard.is_exact or shard.alive else "at least "
        version = "" if shard.version is None else f", version {at_least}{shard.version:,}"
        held = values.count(saved.get(shard.name))
        behind = f" (checkpoint: {held})" if shard.name in saved else ""
        where = f", {values.path(shard.path)}" if shard.path and not shard.alive else ""
        yield shard.name, f"{state}{version}{behind}{where}"
    cost = f": {case.cost or case.loss.text()}"
    is_new = case.action is Action.GO_ON and case.facts.shards is Shards.EMPTY
    result = "it restarts: it had applied no update" if is_new else RESULTS[case.action]
    yield "result", result + (cost if case.action is Action.RESUME else "")
