"""`dlctl simulate`: a job in virtual time, with its real gradients."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import complete_runs, file_argument, json_option
from dlctl.cli.ui import console, protocol_page
from dlctl.errors import JobFailed, UsageError
from dlctl.runs import select
from dlctl.util import units, values

if TYPE_CHECKING:
    from dlctl.ops.simulate import Simulated

_KILLS = re.compile(r"kill (?:a|an|the) (worker|server|coordinator) every (\S+)")
SPREAD_MAX = 3.0
"""One step in six takes then 20 times as long as most, or longer."""
FACTOR_MAX = 1000.0
"""Of a slow worker; and the inverse of a fast one."""


@make_command(
    "dlctl simulate job.toml --workers 16  # how it would train, and how long",
    "dlctl simulate job.toml --link 100Mbit/s,5ms  # a machine for each daemon",
    "dlctl simulate job.toml --slow worker-3=3x --faults 'kill a worker every 60s'",
    "dlctl simulate job.toml --workers 16 --like digits-7f3a  # and how far to believe it",
    "dlctl simulate job.toml --set algorithm.name=diloco --step 20ms  # another method",
    "dlctl simulate job.toml --protocol --workers 1000 --link 10Gbit/s  # where would they wait?",
)
@file_argument
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Instead of the job's.")
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Another value of a key."
)
@click.option("--link", metavar="RATE[,LATENCY]", help="Of every daemon's machine.")
@click.option("--slow", multiple=True, metavar="WORKER=FACTORx", help="A slower worker.")
@click.option("--faults", multiple=True, metavar="WORDS", help='"kill a worker every 60s".')
@click.option(
    "--like",
    metavar="RUN",
    shell_complete=complete_runs,
    help="Steps, evaluations and latencies as in this run.",
)
@click.option("--step", metavar="TIME", help="Of a step.  [default: measured here]")
@click.option("--spread", type=float, default=0.1, help="Of the logarithm of steps' times.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Of times and faults.")
@click.option("--cores", type=click.IntRange(1), help="Of each machine.  [default: as here]")
@click.option("--until", metavar="TIME", help="End it then.  [default: 30d; --protocol: 60s]")
@click.option("--protocol", is_flag=True, help="Leave gradients out: where would workers wait?")
@click.option(
    "--parameters",
    type=click.IntRange(1),
    help="Of the model, with --protocol.  [default: own]",
)
@click.option(
    "--within", metavar="TIME", default="9m", help="With --protocol: of CPU time.  [default: 9m]"
)
@json_option
def command(
    file: Path,
    workers: int | None,
    changes: tuple[str, ...],
    link: str | None,
    slow: tuple[str, ...],
    faults: tuple[str, ...],
    like: str | None,
    step: str | None,
    spread: float,
    seed: int,
    cores: int | None,
    until: str | None,
    protocol: bool,
    parameters: int | None,
    within: str,
) -> None:
    """Runs the job's own model, data and loss in one process, in virtual time: the roles of the
    daemons as they are, and a model of steps, links, disks and faults. It prints how long the run
    would take, what it would send, and how well it would train, and writes a run directory that
    `dlctl report`, `plot`, `status`, `events` and `verify` read when they are given its name. With
    the same seed, --step and --cores it gives the same result. All daemons are on one machine like
    this one, or on the job's hosts; with --link each is on a machine of its own.

    --protocol leaves gradients out, and simulates a window of a run with many workers: how many
    steps they make, and what saturates first, at how many workers.
    """
    from dlctl.ops import simulate  # imported late: it pulls in pydantic
    from dlctl.ops.protocol import simulate_protocol
    from dlctl.sim.request import LinkSpeed, SimulationRequest

    if not 0 <= spread <= SPREAD_MAX:  # Nor is "nan".
        what = f"--spread: {spread:g} is not from 0 to {SPREAD_MAX:g}"
        raise UsageError(what, hint="--spread 0.1: most steps are within 10 % of the median")
    overrides: dict[str, Any] = dict(map(assignment, changes))
    if workers is not None:
        overrides["workers.count"] = workers
    request = SimulationRequest(
        directory="",
        seed=seed,
        cores=cores or 0,
        until_s=of_time("--until", until or ("60s" if protocol else "30d")) or 0.0,
        parameters=parameters or 0,
        step_s=of_time("--step", step),
        spread=spread,
        slow=dict(map(of_slow_worker, slow)),
        link=None if link is None else LinkSpeed.parse(link),
        kill_every_s=dict(map(_fault, faults)),
    )
    if like is not None and step is not None:
        raise UsageError("--like has the durations of steps: remove --step")
    run = None if like is None else select.look(like)
    if protocol:
        if faults:
            raise UsageError("--protocol has no faults", hint="simulate fewer workers without it")
        within_s = of_time("--within", within) or 0.0
        protocol_page.show(simulate_protocol(file, overrides, request, run, within_s))
        return
    if parameters is not None:
        raise UsageError("--parameters belongs to --protocol: else the model is the job's own")
    simulated = simulate.simulate(file, overrides, request, run)
    of_run = None if run is None else run.run_id
    data = _data_of(simulated, of_run, is_measured=step is None and like is None)
    console.show("dlctl.simulate/1", data, "\n".join(lines(data)))
    if data["state"] == "failed":
        raise JobFailed(f"the simulated run failed: {data['reason']}")


def _data_of(simulated: Simulated, like: str | None, *, is_measured: bool) -> dict[str, Any]:
    data = {
        "run_id": simulated.directory.name,
        "directory": str(simulated.directory),
        **simulated.figures,
        "simulated": {**simulated.how, "like": like, "is_measured": is_measured},
    }
    if (replay := simulated.replay) is not None:
        data["replay"] = {
            "run_id": replay.run_id,
            "is_judged": replay.is_judged,
            "waited_share": replay.waited_share,
            "expected_error": replay.expected_error,
            "errors": [{**asdict(error), "error": error.share} for error in replay.errors],
        }
    return data


def lines(data: dict[str, Any]) -> list[str]:
    """For people."""
    how = data["simulated"]
    of_step = "measured here" if how["is_measured"] else "given"
    of_step = f"as in {how['like']}" if how["like"] else of_step
    rows = {
        "outcome": f"{data['state']}: {data['reason']}",
        "time": f"{values.duration(data['seconds'])} of training, virtual; "
        f"{values.duration(data['start_s'])} until it began",
        "samples": f"{data['samples']:,} in {data['step']:,} steps",
        "loss": values.decimal(data["loss"]),
        **{name: values.decimal(value) for name, value in (data["evaluation"] or {}).items()},
        "pushed": units.short_size(data["push_bytes"]),
        "fetched": units.short_size(data["fetch_bytes"]),
        "staleness": values.decimal(data["staleness_mean"]),
        "restarts": str(data["restarts"]),
        "step": f"{1000 * how['step_s']:.3g} ms, {of_step}",
        "simulated": f"in {values.duration(how['real_s'])}, seed {how['seed']}",
    }
    width = max(map(len, rows))
    shown = [f"{name:<{width}}  {console.escape(text)}" for name, text in rows.items()]
    if replay := data.get("replay"):
        shown += ["", f"a replay of {replay['run_id']} itself:"]
        shown += ["", console.table(map(_error, replay["errors"]))]
        if replay["is_judged"]:
            shown.append(
                f"time of this job: within {100 * replay['expected_error']:.0f} %, expected"
            )
        else:
            shown.append(
                "time of this job: cannot be judged: the workers of that run waited for cores for "
                f"{100 * replay['waited_share']:.0f} % of their work"
            )
    return [*shown, "", f"dlctl report -j {data['run_id']}  # its page"]


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    share = error["error"]
    return {
        "FIGURE": error["name"],
        ">REAL": values.decimal(error["real"]),
        ">SIMULATED": values.decimal(error["simulated"]),
        ">ERROR": None if share is None else f"{100 * share:+.1f} %",
    }


def assignment(text: str) -> tuple[str, Any]:
    """ "inner.lr=0.1" as a key and its TOML value. Raises UsageError."""
    key, is_one, value = text.partition("=")
    if not is_one or not key:
        raise UsageError(f'"{text}" is no KEY=VALUE', hint="--set algorithm.local_steps=50")
    with suppress(tomllib.TOMLDecodeError):
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    return key.strip(), value.strip()  # A word without quotes.


def of_slow_worker(text: str) -> tuple[str, float]:
    """ "worker-3=3x" as a name and a factor. Raises UsageError."""
    name, _, factor = text.partition("=")
    try:
        number = float(factor.removesuffix("x"))
    except ValueError:
        number = math.nan
    if not re.fullmatch(r"worker-\d+", name) or math.isnan(number):
        raise UsageError(f'--slow: "{text}" is no worker and factor', hint="--slow worker-3=3x")
    if not 1 / FACTOR_MAX <= number <= FACTOR_MAX:
        what = f"--slow: {factor} is not from {1 / FACTOR_MAX:g}x to {FACTOR_MAX:g}x"
        raise UsageError(what, hint="--slow worker-3=3x")
    return name, number


def _fault(text: str) -> tuple[str, float]:
    found = _KILLS.fullmatch(" ".join(text.split()))
    if found is None:
        raise UsageError(
            f'--faults: "{text}" is none that the simulator knows',
            hint='--faults "kill a worker every 60s"; or a server, or the coordinator',
        )
    return found[1], of_time("--faults", found[2]) or 0.0


def of_time(option: str, text: str | None) -> float | None:
    """The seconds of an option, above zero; None stays None. Raises UsageError."""
    try:
        seconds = None if text is None else units.parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if seconds is not None and seconds <= 0:
        raise UsageError(f"{option}: it must be above zero")
    return seconds
