"""A run as text: its head lines and its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dlctl.cli.ui import console
from dlctl.job.inner import NONE
from dlctl.ops import next_step, other_hosts
from dlctl.problems import CODES
from dlctl.runs import facts, task_code
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.util import values
from dlctl.util.text import plural
from dlctl.util.values import NOTHING

_COLORS = {
    "green": ("running", "finished"),
    "cyan": ("starting", "pending", "queued", "checkpointing", "stopping", "draining"),
    "yellow": ("degraded", "slow", "backoff", "recovering"),
    "red": ("quarantined", "unknown", "gone", "silent", "unreadable", "failed"),
}
SHOWN_MAX = 8
"""Servers or hosts in a line."""
_COLOR = {state: color for color, states in _COLORS.items() for state in states}


def state(text: Any) -> str:
    """A state of a run or daemon, coloured; an unknown state is shown unchanged."""
    shown = str(text if text is not None else "unknown")
    return console.style(shown, fg=_COLOR.get(shown))


def run_state(snapshot: Snapshot) -> str:
    """The state of a run in one or two words; the last report of a silent coordinator is stale."""
    if snapshot.silent_s is not None:
        return console.style("not answering", fg="red")
    return state(snapshot.state)


def uptime(snapshot: Snapshot) -> str:
    """How long it has run: without what it lay stopped or dead."""
    ran_s = facts.ran_s(snapshot)
    return NOTHING if ran_s is None else values.duration(ran_s)


def figures(run: facts.Row) -> list[str]:
    """Step, epoch, loss, and the further metrics of the task's loss: "task loss 0.2, error 0.1"."""
    metrics = run.get("metrics")
    return [
        f"step {values.count(run.get('step'))}",
        f"epoch {values.fixed(run.get('data_epoch'), 2)}",
        f"loss {values.decimal(run.get('loss'))}",
        *([console.escape(f"task {values.measured(metrics)}")] if metrics else []),
    ]


def head(snapshot: Snapshot) -> list[str]:
    """The lines above the table."""
    run = snapshot.run
    why = f" ({console.escape(snapshot.reason)})" if snapshot.reason else ""
    if snapshot.silent_s is not None:
        why = f" for {values.duration(snapshot.silent_s)}"
    parts = [
        console.style(snapshot.run_id, bold=True),
        run_state(snapshot) + why,
        f"up {uptime(snapshot)}" if snapshot.is_live else f"took {uptime(snapshot)}",
        *figures(run),
    ]
    if values.number(run.get("batch_size")):  # Chosen by a worker: it is in no file.
        parts.append(f"batch size {values.count(run['batch_size'])}")
    if snapshot.is_live and isinstance(rates := run.get("rates"), Mapping):
        parts += [f"{_rate_name(snapshot, key)} {values.decimal(lr)}" for key, lr in rates.items()]
    if snapshot.is_live:
        rate = run.get("samples_per_s") if snapshot.is_current else None
        parts.append(f"{values.fixed(rate, 0)} samples/s")
    if snapshot.stale_s is not None and snapshot.silent_s is None:
        age = f"state {values.duration(snapshot.stale_s)} old"
        parts.append(console.style(age, fg="yellow"))
    return ["  ".join(parts), *_facts(snapshot)]


def _rate_name(snapshot: Snapshot, key: object) -> str:
    """That of the servers is the outer one where replicas, or a script, have an optimiser too."""
    inner = read_job(snapshot.directory).get("inner")
    name = inner.get("name") if isinstance(inner, Mapping) else None
    is_outer = key == "lr" and name not in (None, NONE)
    return "outer_lr" if is_outer else console.escape(str(key))


def _facts(snapshot: Snapshot) -> Iterator[str]:
    run, fact = snapshot.run, console.fact
    if isinstance(how := run.get("simulated"), Mapping):
        step = values.duration(how.get("step_s"))
        yield fact("simulated", f"all times are virtual; a step takes {step}")
    launcher, held = other_hosts.held(snapshot)
    if held:
        yield fact(launcher, held)
    if snapshot.is_live and facts.text(run.get("waiting")):
        yield fact("waiting", f"for {facts.text(run['waiting'])}")
    for key, text in uneven(run.get("uneven")) if snapshot.is_live else ():
        yield fact(key, text, is_warning=True)
    if parts := shards(run.get("shards")):
        yield fact("shards", parts)
    if rows := links(run.get("links")):
        yield fact("links", links_in_words(rows))
    if isinstance(run.get("method"), Mapping):
        yield fact("method", values.measured(run["method"]))
    if (samples := values.number(run.get("noise_scale"))) is not None:
        yield fact("noise", f"the gradient noise scale is {samples:.0f} samples")
    if isinstance(found := run.get("evaluation"), Mapping):
        step = values.count(run.get("evaluation_step"))
        yield fact("evaluation", f"{values.measured(found)} (at step {step})")
    if isinstance(done := run.get("finish"), Mapping) and (why := facts.text(done.get("error"))):
        yield fact("finish", why, is_warning=True)
    if isinstance(run.get("checkpoint"), Mapping):
        yield fact("checkpoint", newest_checkpoint(snapshot))
    if isinstance(mirror := run.get("mirror"), Mapping):
        yield fact("mirror", mirrored(mirror, snapshot.now))
    if snapshot.is_live and (files := task_code.changed(snapshot.directory)):
        names = ", ".join(map(values.path, files))
        old = "changed since the start, but the old version is used (dlctl restart reloads it)"
        yield fact("code", f"{names}: {old}", is_warning=True)


def shards(found: Any) -> str:
    """The servers' parts of the model, "server-0 50.0 %, ..."; "" if they are equal."""
    sizes = [n for n in found if type(n) is int] if isinstance(found, list | tuple) else []
    total = sum(sizes)
    if not total or max(sizes) - min(sizes) <= 1:
        return ""
    shown = [f"server-{i} {100 * n / total:.1f} %" for i, n in enumerate(sizes[:SHOWN_MAX])]
    return ", ".join(shown + ([f"and {len(sizes) - SHOWN_MAX} more"] if sizes[SHOWN_MAX:] else []))


class LinkRow(NamedTuple):
    """The bytes over the link of a host."""

    host: str
    out_bytes: int
    in_bytes: int


def links(found: Any) -> list[LinkRow]:
    """The links in a run's status, in the order of the hosts; [] if it has one host only."""
    rows = found.values() if isinstance(found, Mapping) else ()
    return [
        LinkRow(str(row.get("host")), *(int(row[key]) for key in ("out_bytes", "in_bytes")))
        for row in rows
        if isinstance(row, Mapping)
        and all(values.number(row.get(key)) is not None for key in ("out_bytes", "in_bytes"))
    ]


def links_in_words(rows: Sequence[LinkRow]) -> str:
    """The bytes of each, and how much more the fullest one carries than the mean."""
    sums = [row.out_bytes + row.in_bytes for row in rows]
    total = sum(sums)
    shown = [
        f"{row.host} {values.size(row.out_bytes)} out, {values.size(row.in_bytes)} in"
        for row in rows[:SHOWN_MAX]
    ]
    shown += [f"and {len(rows) - SHOWN_MAX} more"] if rows[SHOWN_MAX:] else []
    if total:
        shown.append(f"the fullest has {max(sums) * len(sums) / total:.2f} x the mean")
    return "; ".join(shown)


def uneven(found: Any) -> Iterator[tuple[str, str]]:
    """Setting -> the values of the servers, of settings in which the shards of the model differ."""
    for key, of in found.items() if isinstance(found, Mapping) else ():
        if isinstance(of, Mapping):
            shards = ", ".join(f"{server} {value}" for server, value in of.items())
            yield str(key), f"{shards}: the parts of the model differ (dlctl set {key}=VALUE)"


def without_residuals(row: facts.Row) -> str:
    """What a checkpoint's row lacks: what pushes left out; "" if nothing is missing."""
    names = row.get("without") or []
    return f"without the residuals of {' and '.join(names)}" if names else ""


def newest_checkpoint(snapshot: Snapshot) -> str:
    """The newest checkpoint in a line, with the steps that an ended run did after it."""
    row = snapshot.run["checkpoint"]
    saved = values.number(row.get("step"))
    unsaved = 0 if snapshot.is_live or saved is None else facts.steps_after(snapshot, saved)
    parts = [
        f"step {values.count(row.get('step'))}",
        f"{plural(unsaved, 'step')} before the end" if unsaved else "",
        values.ago(row.get("at"), snapshot.now),
        values.size(row.get("nbytes")),
        values.path(row["path"]) if isinstance(row.get("path"), str) else "",
        without_residuals(row),
    ]
    return ", ".join(part for part in parts if part not in ("", NOTHING))


def mirrored(row: facts.Row, now: float) -> str:
    """The newest checkpoint in the mirror in a line, and what is on the way."""
    has_one = values.number(row.get("step")) is not None
    parts = [f"step {values.count(row['step'])}" if has_one else "no checkpoint yet"]
    parts += [values.ago(row.get("at"), now)] if has_one else []
    lag = values.number(row.get("lag_steps"))
    if row.get("pending"):
        parts.append(f"{lag:.0f} steps behind" if lag else "an upload is under way")
        if of_bytes := values.number(row.get("of_bytes")):
            parts.append(f"{values.size(row.get('sent_bytes'))} of {values.size(of_bytes)} sent")
    return ", ".join([*parts, console.escape(str(row.get("address")))])


def as_data(snapshot: Snapshot) -> dict[str, Any]:
    """A run as JSON, without its daemons: all its keys, and the corrected state."""
    truth = {
        "run_id": snapshot.run_id,
        "state": snapshot.state,
        "reason": snapshot.reason,
        "is_live": snapshot.is_live,
        "stale_s": snapshot.stale_s,
        "silent_s": snapshot.silent_s,
        "unwritten_s": snapshot.unwritten_s,
        "directory": str(snapshot.directory),
        "allocation": other_hosts.held(snapshot)[1] or None,
    }
    data: dict[str, Any] = values.timed({**snapshot.run, **truth})
    data.pop("problems", None)  # These are as recorded; `dlctl.ops.problems` has the current ones.
    return data


def next_commands(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Commands for a run that was started or has ended, and what they do."""
    job = f"-j {snapshot.run_id}"
    rows = [(f"dlctl status {job}", "rates, staleness and problems of every daemon")]
    if snapshot.is_live:
        rows += [(f"dlctl logs -f {job}", "follow it"), (f"dlctl stop {job}", "stop it")]
    elif isinstance(saved := snapshot.run.get("checkpoint"), Mapping) and saved.get("step"):
        rows.append((f"dlctl checkpoint export {job}", "the model for torch"))
    if snapshot.state == "finished":
        file = next_step.job_file(snapshot)
        rows.append((f"dlctl run --fresh {file}", "train from the beginning"))
        rows.append((f"dlctl run {file}", "train on, with a later stop in [job]"))
    return rows


def event(row: facts.Row, now: float) -> str:
    """One event in a line: time, daemon, kind, text."""
    kind, daemon = console.escape(str(row["kind"])), console.escape(str(row["daemon"]) or "run")
    text, code = console.escape(str(row["text"])), row["data"].get("code")
    shown = console.style(f"  [{code}]", dim=True) if code in CODES else ""
    return f"{values.clock(row['at'], now)}  {daemon:<12} {kind:<12} {text}{shown}"
