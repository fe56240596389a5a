"""How large a job's model is, as an earlier run of the same job file has saved it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlctl.cli import knownruns
from dlctl.health.needs import Model

if TYPE_CHECKING:
    from dlctl.config import JobFile


def find(file: Path, job: JobFile) -> Model | None:
    """By the newest checkpoint of the newest run that has one; None if there is none."""
    from dlctl.runs import checkpoints

    for run in reversed(knownruns.of_job(knownruns.job_file(file), job.job.name)):
        if found := checkpoints.complete(run.directory):
            manifest = checkpoints.read_manifest(found[-1])
            stored_bytes = sum(shard["nbytes"] for shard in manifest["shards"])
            return Model(manifest["size"], stored_bytes, manifest["step"])
    return None
