"""Scripts that end before they have joined the run: it fails, and names the line and the remedy."""

from __future__ import annotations

import pytest
from workplace import Workplace

FAULTS = {
    "syntax": ("import dlctl\n\nrun = dlctl.attach(\n", ":3", "raised SyntaxError"),
    "no attach": ("import sys\nsys.exit(0)\n", ":2", "without a call of dlctl.attach"),
    "raises": ("import json\njson.loads('')\n", ":2", "raised JSONDecodeError"),
}


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", FAULTS)
def test_a_script_that_ends_before_it_attaches_fails_the_run(place: Workplace, name: str) -> None:
    text, line, says = FAULTS[name]
    place.task(text)
    file = place.path / "job.toml"
    place.job(workers=2, algorithm='name = "local-sgd"')
    file.write_text(file.read_text().replace('task = "train.py:task"', 'script = "train.py"'))
    ended = place.dlctl("run", "job.toml")
    assert ended.code == 7, ended.err
    why = f"{place.path / 'train.py'}{line}"
    errors = ended.err[ended.err.index("error: ") :].splitlines()
    assert why in errors[0]
    assert says in errors[0]
    assert place.run()["state"] == "failed"
    assert not place.daemon("worker-0").get("restarts")
    assert f"fix train.py{line}" in place.dlctl("why").out
    place.nothing_left()
