"""MLflow, through its own client: one run in the experiment of the job."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from daemons.tracker.client import settings
from daemons.tracker.notes import TrackerNotes
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile
from dlctl.jobfile.stores import ENV

DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # This process is started again, with a longer pause each time.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Of the package's variables, where the user has not set them."""
MARK = "dlctl.run"
"""Tag of a run by which the next process finds it, if this one dies before it has noted its id."""
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
METRICS_MAX, PARAMS_MAX = 1000, 100
"""In a request; of the server."""
PARAM_CHARS_MAX = 500
_NOT_ALLOWED = re.compile(r"[^\w\-. /]", re.ASCII)


class MlflowRun:
    holds_s = 0.0

    def __init__(self, directory: Path, job: JobFile, notes: TrackerNotes) -> None:
        """Raises what the package raises, and DlctlError."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._entities = entities
        self._client = MlflowClient(tracking_uri=_address(job.log.mlflow))
        if "mark" not in notes.run:
            notes.name(mark=secrets.token_hex(8))
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or job.job.name)
        if "id" not in notes.run:
            notes.name(id=self._found(experiment, notes) or self._new(experiment, directory, notes))
        self._id = notes.run["id"]
        self._client.update_run(self._id, status="RUNNING")
        self._put_params(settings(job))

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            with suppress(Exception):  # Another run may just have made it.
                return str(self._client.create_experiment(name))
            found = self._client.get_experiment_by_name(name)
        if found is None:
            raise DlctlError(f'cannot make the experiment "{name}"')
        return str(found.experiment_id)

    def _found(self, experiment: str, notes: TrackerNotes) -> str:
        mark = f"tags.`{MARK}` = '{notes.run['mark']}'"
        found = self._client.search_runs([experiment], mark, max_results=1)
        return str(found[0].info.run_id) if found else ""

    def _new(self, experiment: str, directory: Path, notes: TrackerNotes) -> str:
        tags = {MARK: notes.run["mark"]}
        run = self._client.create_run(experiment, run_name=directory.name, tags=tags)
        return str(run.info.run_id)

    def _put_params(self, wanted: Mapping[str, Any]) -> None:
        """A parameter is never changed: those of the first start stay."""
        there = self._client.get_run(self._id).data.params
        new = [
            self._entities.Param(_name(key), str(value)[:PARAM_CHARS_MAX])
            for key, value in wanted.items()
            if _name(key) not in there
        ]
        for start in range(0, len(new), PARAMS_MAX):
            self._client.log_batch(self._id, params=new[start : start + PARAMS_MAX])

    def log(self, rows: Sequence[Mapping[str, Any]]) -> None:
        metrics = [*self._metrics(rows)]
        for start in range(0, len(metrics), METRICS_MAX):
            self._client.log_batch(self._id, metrics=metrics[start : start + METRICS_MAX])

    def _metrics(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        for row in rows:
            at_ms = int(row["at"] * 1000)
            for tag, value in row["values"].items():
                yield self._entities.Metric(_name(tag), value, at_ms, row["step"])

    def end(self, outcome: str) -> None:
        self._client.set_terminated(self._id, STATUS[outcome])

    def leave(self) -> None:
        """Everything is in the store already."""


def _address(text: str) -> str:
    """Raises DlctlError."""
    if not text.startswith(ENV):
        return text
    name = text.removeprefix(ENV)
    if not (address := os.environ.get(name, "")):
        raise DlctlError(f"the environment variable {name} is not set")
    return address


def _name(tag: str) -> str:
    """A name that MLflow takes: it is a path, of few characters."""
    parts = _NOT_ALLOWED.sub("_", tag).split("/")
    return "/".join(part if part.strip(".") else "_" * len(part) for part in parts if part)
