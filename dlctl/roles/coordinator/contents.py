"""What a checkpoint holds, and what its manifest says of its run and of each file."""

from __future__ import annotations

from dlctl import messages as m
from dlctl.config import JobFile
from dlctl.flat import Layout
from dlctl.messages import Json
from dlctl.runs.manifest import FAILURE

FAILURE_CHARS = 500


def leaves_residuals(job: JobFile) -> bool:
    """Whether a push leaves anything to the next one."""
    choice = job.compression
    return choice.name != "none" or choice.options.get("values", "float32") != "float32"


def manifest_of(
    run_id: str, job: JobFile, layout: Layout, data: Json, evaluation: Json | None, failure: str
) -> Json:
    """What a checkpoint that begins now says of its run.

    `data`: how far it is (`Scheduler.to_json`). `failure`: why the run has failed, or "".
    """
    return {
        "run_id": run_id,
        "job": job.job.name,
        "samples": data["samples"],
        "layout": layout.to_rows(),
        "size": layout.size(),
        "algorithm": job.algorithm.name,
        "optimizer": job.optimizer.name,
        "data": data,
        "evaluation": evaluation,
        **({FAILURE: failure[:FAILURE_CHARS]} if failure else {}),
    }


def part_of(saved: m.Saved) -> Json:
    """What is said of one file."""
    part: Json = {"name": saved.name, "file": saved.file, "sha256": saved.sha256}
    part |= {"nbytes": saved.nbytes, "state": saved.state}
    lo_hi = {key: saved.state[key] for key in ("lo", "hi") if key in saved.state}
    return part | lo_hi
