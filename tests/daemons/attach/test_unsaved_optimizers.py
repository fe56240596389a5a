"""Whose loop steps with an optimizer that the run would have to save."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons.attach.session import steps_in_loop
from dlctl import jobfile


@pytest.mark.parametrize(
    ("method", "is_stepped"),
    [("local-sgd", True), ("diloco", True), ("downpour", False), ("sync", False),
     ("allreduce", False)],
)  # fmt: skip
def test_an_optimizer_is_missed_only_where_the_loop_calls_its_step(
    tmp_path: Path, method: str, is_stepped: bool
) -> None:
    """`run.optimizer` comes after `run.loader` in some scripts: who joins has none yet."""
    servers = 0 if method == "allreduce" else 1
    (tmp_path / "loop.py").touch()
    (tmp_path / "job.toml").write_text(
        f'[job]\nname = "loop"\nscript = "loop.py"\nstop = {{ epochs = 1 }}\n[algorithm]\n'
        f'name = "{method}"\n[servers]\ncount = {servers}\n[workers]\ncount = 2\nbatch_size = 8\n'
    )
    assert steps_in_loop(jobfile.load(tmp_path / "job.toml")) == is_stepped
