"""The findings of `dlctl recover`, a key and a value in each line."""

from __future__ import annotations

from collections.abc import Iterator

from dlctl.cli.ui import console
from dlctl.ops import cases, problems
from dlctl.ops.cases import Case
from dlctl.ops.decide import Action
from dlctl.util import values

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
    cost = f": {case.cost or case.loss.text()}" if case.action is Action.RESUME else ""
    is_idle = case.action in (Action.ALREADY_RUNNING, Action.OVER)
    yield "result", f"{'nothing to recover: ' if is_idle else ''}{cases.headline(case)}{cost}"
