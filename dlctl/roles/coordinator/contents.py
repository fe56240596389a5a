"""What a checkpoint holds, and what its manifest says of its run and of each file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl import messages as m
from dlctl.config import JobFile
from dlctl.messages import Json
from dlctl.runs.manifest import FAILURE

if TYPE_CHECKING:
    from dlctl.roles.coordinator.coordinator import Coordinator

FAILURE_CHARS = 500


def leaves_residuals(job: JobFile) -> bool:
    """Whether a push leaves anything to the next one."""
    choice = job.compression
    return choice.name != "none" or choice.options.get("values", "float32") != "float32"


def manifest_of(coordinator: Coordinator) -> Json:
    """What a checkpoint that begins now says of its run."""
    of, layout = coordinator, coordinator.arrivals.layout
    assert layout is not None
    end = of.ending
    failure = {FAILURE: end.reason[:FAILURE_CHARS]} if end and end.state == "failed" else {}
    return {
        "run_id": of.arrivals.run_id,
        "job": of.job.job.name,
        "samples": of.work.samples,
        "layout": layout.to_rows(),
        "size": layout.size(),
        "algorithm": of.job.algorithm.name,
        "optimizer": of.job.optimizer.name,
        "data": of.work.to_json(),
        "evaluation": of.evaluations.newest,
        **failure,
    }


def part_of(saved: m.Saved) -> Json:
    """What is said of one file."""
    part: Json = {"name": saved.name, "file": saved.file, "sha256": saved.sha256}
    part |= {"nbytes": saved.nbytes, "state": saved.state}
    lo_hi = {key: saved.state[key] for key in ("lo", "hi") if key in saved.state}
    return part | lo_hi
