"""A small GPT behind slow links while daemons are killed: loss, bytes and seconds of each method.

`examples/chargpt` with four workers, each on a host behind 100 Mbit/s and 5 ms one way; servers and
the coordinator are where the links meet. After a third of the samples a worker is killed, after two
thirds a server. DiLoCo over gloo runs for comparison, without kills, which it would not survive.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import Figure
from benchmarks.peers.places import ROOT, Place, free_port, links, why_no_links
from benchmarks.sandbox import Dlctl, pushed_bytes, sandbox
from dlctl.runs import database

CHAPTER = "methods_slow"
EXAMPLE = Path(__file__).parents[1] / "examples" / "chargpt"
WORKERS, MBIT_PER_S, DELAY_MS = 4, 100.0, 5.0
GLOO = "diloco on gloo, no kills"
VICTIMS = ((1 / 3, "worker-2"), (2 / 3, "server-0"))
"""(fraction of the samples after which it is killed, daemon)."""
LIMIT_S = 1800.0
LOOK_S = 0.5
QUICK_SAMPLES = 1920


class Job(NamedTuple):
    """A job of the example, and replacements of some of its sections."""

    base: str
    sections: str = ""


JOBS = {
    "sparseloco": Job("sparseloco"),
    "diloco": Job("diloco"),
    "streaming-diloco": Job(
        "diloco",
        '[algorithm]\nname = "streaming-diloco"\nlocal_steps = 30\nfragments = 3\n'
        'delay_steps = 1\n[compression]\nname = "e3m0"\n',
    ),
    "async-diloco": Job(
        "diloco",
        '[algorithm]\nname = "async-diloco"\nlocal_steps = 30\n'
        '[optimizer]\nname = "delayed-nesterov"\nlr = 0.7\n',
    ),
    "downpour, top-k 1 %": Job("downpour", '[compression]\nname = "topk-sampled"\n'),
}


class Ended(NamedTuple):
    """The result of one run."""

    loss: float
    seconds: float
    """From the first step to the end of the run."""
    wire_bytes: int
    """Of all processes, from start to end, with headers."""
    push_bytes: int = 0


def measure(*, quick: bool) -> list[Figure]:
    names = [*JOBS, GLOO]
    if why := why_no_links():
        return [Figure(CHAPTER, name, "nats", (), skipped=why) for name in names]
    figures = []
    with tempfile.TemporaryDirectory(prefix="dlctl-slow-") as name, sandbox():
        shared = Path(name)
        shutil.copy(EXAMPLE / "task.py", shared)
        with links(WORKERS, MBIT_PER_S, DELAY_MS, shared) as place:
            figures += [_figure(name, place, shared, quick=quick) for name in names]
    return figures


def _figure(name: str, place: Place, shared: Path, *, quick: bool) -> Figure:
    print(f"  {name} ...", file=sys.stderr, flush=True)
    samples = QUICK_SAMPLES if quick else 38_400
    try:
        if name == GLOO:
            ended = _gloo(place, shared, samples)
        else:
            ended = _dlctl(name, place, shared, samples)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Figure(CHAPTER, name, "nats", (), failed=str(error))
    detail = f"{ended.seconds:.0f} s, {ended.wire_bytes / 1e6:,.0f} MB on the wire"
    if ended.push_bytes:
        detail += f", {ended.push_bytes / 1e6:,.1f} MB pushed"
    print(f"  {name}: {ended.loss:.3f}; {detail}", file=sys.stderr, flush=True)
    return Figure(CHAPTER, name, "nats", (ended.loss,), detail=detail)


# ---------------------------------------------------------------- dlctl


def _dlctl(name: str, place: Place, shared: Path, samples: int) -> Ended:
    """One run with its kills. Raises RuntimeError if it does not finish or no daemon was killed."""
    file = shared / f"{name.split(',')[0]}.toml"
    file.write_text(_job(JOBS[name], place.hosts, samples))
    dlctl = Dlctl(place.head.enter, place.env)
    before = place.sent_bytes()
    dlctl("start", "--fresh", str(file))
    try:
        victims, until = list(VICTIMS), time.monotonic() + LIMIT_S
        while (status := _status(dlctl, file))["state"] not in database.ENDED:
            if time.monotonic() > until:
                raise RuntimeError(f"timeout after {LIMIT_S:.0f} s: {status['reason']}")
            if victims and status["samples"] >= victims[0][0] * samples:
                _kill(place, victims.pop(0)[1])
            time.sleep(LOOK_S)
        if status["state"] != "finished" or victims:
            raise RuntimeError(f"{status['state']}: {status['reason']}; not killed: {victims}")
    finally:
        dlctl("stop", "--kill", "-q", "-j", str(file))
    sent = place.sent_bytes() - before
    ready_at, ended_at = (datetime.fromisoformat(status[key]) for key in ("ready_at", "ended_at"))
    took_s = (ended_at - ready_at).total_seconds()
    return Ended(status["evaluation"]["val_loss"], took_s, sent, pushed_bytes(status))


def _status(dlctl: Dlctl, file: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(dlctl("status", "--json", "-j", str(file)))
    return status


def _job(job: Job, hosts: Sequence[str], samples: int) -> str:
    """The example's job, with one worker on each host and all other daemons here."""
    text = (EXAMPLE / f"{job.base}.toml").read_text()
    text = re.sub("samples = [0-9_]+", f"samples = {samples}", text)
    text = text.replace("[workers]\n", "[workers]\nthreads = 1\n")
    for section in re.findall(r"^\[(\w+)\]", job.sections, re.MULTILINE):
        text = re.sub(rf"^\[{section}\].*\n(?:[^\[\n].*\n|\n)*", "", text, flags=re.MULTILINE)
    others = [f'[[hosts]]\nssh = "{host}"\nservers = 0\nworkers = 1\n' for host in hosts]
    return "".join([text, "\n", job.sections, '[[hosts]]\nssh = ""\nworkers = 0\n', *others])


def _kill(place: Place, daemon: str) -> None:
    """SIGKILL a daemon on any host. Raises RuntimeError if there is no such daemon."""
    for process in place.processes():
        words = process.cmdline()
        if len(words) > 5 and words[3].startswith("daemons.") and words[5] == daemon:
            process.kill()
            return
    raise RuntimeError(f"no {daemon} to kill")


# ---------------------------------------------------------------- gloo


def _gloo(place: Place, shared: Path, samples: int) -> Ended:
    """Raises RuntimeError if a process fails, TimeoutExpired if one does not exit."""
    file, before = shared / "gloo.json", place.sent_bytes()
    order = {
        "workers": WORKERS, "address": place.workers[0].address, "port": free_port(),
        "samples": samples, "seed": 0, "file": str(file),
    }  # fmt: skip
    processes = []
    try:
        for rank, spot in enumerate(place.workers):
            command = [*spot.enter, sys.executable, "-m", "benchmarks.peers.chargpt_diloco"]
            command.append(json.dumps({**order, "rank": rank}))
            here = {"GLOO_SOCKET_IFNAME": spot.interface, "PYTHONPATH": str(ROOT)}
            processes.append(subprocess.Popen(command, cwd=ROOT, env={**place.env, **here}))
        if any(process.wait(LIMIT_S) for process in processes):
            raise RuntimeError("a gloo process failed: see stderr")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    result = json.loads(file.read_text())
    return Ended(result["loss"], result["seconds"], place.sent_bytes() - before)
