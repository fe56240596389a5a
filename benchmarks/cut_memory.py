"""The peak memory of each process of a replica that is split over two, against one process.

All train a wider GPT of `examples/chargpt` with AdamW in the replica and Downpour to one server, a
fetch and a push every second step, with evaluations and a checkpoint, and resume from that
checkpoint. Memory is the kernel's proportional set size without mapped files: a shared page is
divided among its processes, so the sum over all processes is what the host has less, independent of
how many others map torch's libraries. The memory of the same job with a tiny model (dlctl, torch
and Python) is subtracted.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, sandbox
from dlctl.runs import database, paths

CHAPTER = "cut_memory"
EXAMPLE = Path(__file__).parents[1] / "examples" / "chargpt"
SHARE_ASKED = 0.6
WIDTHS = 16, 512
"""For models of 0.1 and 101 MB."""
STEPS, POLL_S = 8, 0.02
KINDS = "Pss_Anon", "Pss_Shmem"
CUTS = {"one process": "", "fsdp = 2": "fsdp = 2", "pipeline = 2": "pipeline = 2"}
TASK = f'''"""The GPT of the example, of another width."""
import sys

sys.path.insert(0, {str(EXAMPLE)!r})
import task as example

example.WIDTH, example.HEADS, example.LAYERS = {{width}}, 8, 8


class Wide:
    held_out = None
    model, dataset, loss = example.CharGpt.model, example.CharGpt.dataset, example.CharGpt.loss
    evaluate = example.CharGpt.evaluate


example.EVALUATED = 2
task = Wide()
'''
DOWNPOUR = """[algorithm]
name = "downpour"
fetch_every_steps = 2
push_every_steps = 2"""
JOB = """[job]
name = "bench"
task = "train.py:task"
stop = {{ steps = {steps} }}
{method}
[inner]
name = "adamw"
lr = 1e-4
[optimizer]
name = "sgd"
lr = 1.0
[servers]
count = 1
[workers]
count = 1
batch_size = {batch_size}
threads = 1
device = "cpu"
[replica]
{cut}
[data]
portion_batches = 2
[checkpoints]
every_s = 0
[evaluation]
every_steps = 6
"""


def measure(*, quick: bool) -> list[Figure]:
    """quick: the tiny model instead of the large one."""
    widths = WIDTHS[:1] * 2 if quick else WIDTHS
    peaks = {
        name: [peaks_of(width, cut, resumes=bool(cut)) for width in widths]
        for name, cut in CUTS.items()
    }
    (whole,) = _grown(peaks.pop("one process"))
    return [
        Figure(
            CHAPTER, f"{name}: peak of rank {rank} / one process", "x", (grown / (whole or 1),),
            asked=SHARE_ASKED, detail=f"{grown / 1e6:.0f} MB against {whole / 1e6:.0f} MB",
        )
        for name, found in peaks.items()
        for rank, grown in enumerate(_grown(found))
    ]  # fmt: skip


def _grown(found: list[list[int]]) -> list[int]:
    """Bytes of each rank minus those with the tiny model."""
    small, large = found
    return [b - a for a, b in zip(small, large, strict=True)]


def peaks_of(width: int, cut: str, method: str = DOWNPOUR, *, resumes: bool = False) -> list[int]:
    """Peak bytes of each rank in a whole run. cut: of `[replica]`, "" for one process. resumes:
    also resume from its checkpoint for as many steps.
    """
    ranks = int(cut.split()[-1]) if cut else 1
    dlctl = Dlctl()
    with sandbox() as directory:
        (directory / "train.py").write_text(TASK.format(width=width))
        file = directory / "job.toml"
        job = {"cut": cut, "method": method, "batch_size": max(ranks, 2)}
        peaks = [0] * ranks
        for steps in (STEPS, 2 * STEPS) if resumes else (STEPS,):
            file.write_text(JOB.format(steps=steps, **job))
            dlctl("start", "--no-wait", str(file))
            try:
                of_both = zip(peaks, _watch(list(paths.all_runs())[-1], ranks), strict=True)
                peaks = [max(pair) for pair in of_both]
            finally:
                dlctl("stop", "--kill", "-q", "-j", str(file))
    print(f"  {cut or 'whole'}, width {width}: {peaks}", file=sys.stderr, flush=True)
    return peaks


def _watch(run: Path, ranks: int) -> list[int]:
    """Waits until the run has finished. Raises RuntimeError if it does not."""
    peaks, pids = [0] * ranks, list[int]()
    while (found := database.read(run)).get("state") not in database.ENDED:
        if len(pids) < ranks:
            pids = _pids(found)
        for rank, pid in enumerate(pids):
            peaks[rank] = max(peaks[rank], own_bytes(pid))
        time.sleep(POLL_S)
    if found["state"] != "finished":
        raise RuntimeError(f"{found['state']}: {found['reason']}")
    return peaks


def _pids(found: dict[str, Any]) -> list[int]:
    """Of worker-0 and of the other existing processes of its replica."""
    rows = (row for row in found.get("daemons", []) if row["name"] == "worker-0")
    pid = next((row.get("pid") for row in rows), None)
    try:
        children = psutil.Process(pid).children() if pid else []
        later = [c.pid for c in children if "daemons.worker.later_rank" in c.cmdline()]
    except psutil.Error:
        return []
    return [pid, *later] if pid else []


def own_bytes(pid: int) -> int:
    """0 if the process has exited."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(text.split(f"\n{kind}:")[1].split()[0]) for kind in KINDS) * 1024
