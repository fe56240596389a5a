"""The size of a job's model before its first start: another process builds it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from dlctl import registry
from dlctl.algorithms.tables import optimizer_of
from dlctl.errors import UsageError
from dlctl.health.needs import Model
from dlctl.job.config import JobFile, to_dict
from dlctl.launch.base import same_hashes
from dlctl.model.flat import Layout
from dlctl.ops import other_process
from dlctl.optim import bounds
from dlctl.optim.averaged import Averaged
from dlctl.util import regular


def built(job: JobFile) -> Model:
    """The model as the task builds it. Raises UsageError for a script, and DlctlError for what is
    wrong with the task.
    """
    if job.has_loop:
        raise UsageError(
            "only a script itself builds its model: it is known once a worker has attached",
            where=job.job.file,
            hint="start the job; later plans know the sizes from its first checkpoint",
        )
    with tempfile.TemporaryDirectory(prefix="dlctl-model-") as directory:
        file = Path(directory) / "layout.json"
        other_process.run(
            "daemons.worker.model_layout", [str(file)], Path(job.job.task),
            "the model could not be built",
            input=json.dumps(to_dict(job)), env={**os.environ, **same_hashes(job.job.seed)},
        )  # fmt: skip
        return of_layout(job, Layout.from_rows(json.loads(regular.read_bytes(file))))


def of_layout(job: JobFile, layout: Layout) -> Model:
    """What the servers of a job store of a model with this layout, all together."""
    method = registry.load("algorithms", job.algorithm.name)
    options = method.Options(**job.algorithm.options)
    stored = 0
    for table in method.shape.tables_of(options):
        optimizer = bounds.made(job)
        if job.average.ema:
            optimizer = Averaged(optimizer, job.average.ema)
        rule = optimizer_of(table, method, options, optimizer, job.workers.count)
        each = 8 if table.dtype == "float64" else bounds.FLOAT_BYTES
        stored += table.size(layout) * (each + bounds.FLOAT_BYTES * len(rule.slots))
    beside = bounds.matrix_bytes(job, layout, 0, layout.size())
    return Model(layout, stored + beside, None, beside)
