"""The layout of a job's model: `python -m daemons.worker.model_layout OUTPUT`.

`dlctl plan --model` runs this. The job is read as JSON from standard input; OUTPUT gets the layout
as JSON. The task is loaded, and its model is built, as in a worker; no data is. A model that is
divided among parties (`dlctl/model/parts.py`) has the layouts of all parts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from daemons.process import print_error
from daemons.worker.building import build_replica
from dlctl.errors import DlctlError
from dlctl.job.config import JobFile, from_dict
from dlctl.model import parts


def main(output: str) -> int:
    """Run the command; returns its exit code. An error is one line of JSON on standard error."""
    try:
        job = from_dict(JobFile, json.load(sys.stdin))
        division = parts.of_job(job)
        layout = division.joined([build_replica(job, slot).layout for slot in division.firsts()])
        Path(output).write_text(json.dumps(layout.to_rows()), encoding="utf-8")
    except DlctlError as error:
        print_error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
