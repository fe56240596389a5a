"""Scripts with other packages' training loops, whose workers are on two hosts over ssh.

`make integrations` has environments with these packages, and runs this module there.
"""

from __future__ import annotations

import shutil

import pytest
from workplace import Workplace

from .cluster import Cluster
from .jobs import ENDLESS, EXAMPLES, LONG_S, daemons, host_files, kill

pytestmark = [pytest.mark.root, pytest.mark.long, pytest.mark.timeout(400)]

TWO_HOSTS = '[[hosts]]\nssh = "h1"\n[[hosts]]\nssh = "h2"\nservers = 0\n'
WORKERS = 4
BEGIN_S = 120.0
"""Four scripts load their packages, on a busy machine."""


@pytest.mark.parametrize("example", ["transformers", "lightning"])
def test_it_trains_over_ssh_and_returns_when_it_is_killed(
    cluster: Cluster, place: Workplace, example: str
) -> None:
    folder = EXAMPLES / example
    shutil.copy(folder / "train.py", place.path)
    job = (folder / "job.toml").read_text()
    workers = f"[workers]\ncount = {WORKERS}\n"
    job = job.replace("[workers]\ncount = 2\n", workers)
    assert workers in job
    (before,) = (line for line in job.splitlines() if line.startswith("stop = "))
    job = job.replace(before, f"stop = {ENDLESS}")
    (place.path / "job.toml").write_text(f"{job}\n{TWO_HOSTS}")
    started = place.dlctl("start", "job.toml", timeout_s=BEGIN_S)
    assert started.code == 0, started.err
    place.until_step(100, BEGIN_S)
    on_h2 = [name for name in daemons(cluster, "h2") if name.startswith("worker")]
    assert len({*on_h2}) == WORKERS // 2
    kill(cluster, "h2", on_h2[-1])

    def has_joined() -> bool:
        row = place.daemon(on_h2[-1])
        return row["incarnation"] == 2 and row["phase"] == "computing"

    place.until("it computes again", has_joined, BEGIN_S)
    place.until_step(place.run()["step"] + 100, LONG_S)
    assert place.dlctl("stop", timeout_s=LONG_S).code == 0
    assert place.run()["state"] == "stopped", place.story()
    assert place.dlctl("verify").code == 0
    for name in cluster.names:
        assert not host_files(cluster, name)
    place.nothing_left()
