"""examples/ray on a real Ray cluster of three nodes, one of which is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from workplace import Workplace, opened

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray"
LONG_S = 120.0
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=3) for _ in range(2)]
cluster.wait_for_nodes()
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes[int(line)], allow_graceful=False)
    print("killed", flush=True)
cluster.shutdown()
"""


@pytest.fixture
def place() -> Iterator[Workplace]:
    with opened() as workplace:
        for file in EXAMPLE.iterdir():
            if file.is_file():
                shutil.copy(file, workplace.path)
        loop = workplace.path / "train.py"
        step = "            run.step(loss=loss)\n"
        assert step in loop.read_text()
        wait = "            __import__('threading').Event().wait(0.03)\n"
        loop.write_text(loop.read_text().replace(step, step + wait))
        yield workplace


@pytest.fixture
def cluster(place: Workplace) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=place.path, env={**place.env, **RAY},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()
            process.wait(LONG_S)


def hosts(place: Workplace) -> dict[str, int]:
    """The processes of the workers that train and have joined, by name."""
    rows = place.run()["daemons"]
    return {
        row["name"]: row["pid"]
        for row in rows
        if row["name"].startswith("worker-")
        and row["state"] == "running"
        and row["name"] != "worker-0"
    }


def test_actors_join_and_those_of_a_killed_node_come_back(
    place: Workplace, cluster: subprocess.Popen[str]
) -> None:
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    place.start()
    names = [f"worker-{n}" for n in (1, 2, 3)]
    for name in names:
        assert place.dlctl("keys", "invite", name).code == 0
    address = cluster.stdout.readline().strip()
    env = {**os.environ, **place.env, **RAY, "RAY_ADDRESS": address}
    with subprocess.Popen(
        [sys.executable, "join.py", *(f"{name}.invite" for name in names)], cwd=place.path, env=env
    ) as driver:
        try:
            place.until("all train", lambda: len(hosts(place)) == 3, LONG_S)
            before = hosts(place)
            cluster.stdin.write("0\n")
            cluster.stdin.flush()
            assert cluster.stdout.readline() == "killed\n"
            place.until("some are gone", lambda: before.items() - hosts(place).items(), LONG_S)
            step = place.run()["step"]
            place.until_step(step + 50, LONG_S)
            place.until("all train again", lambda: len(hosts(place)) == 3, LONG_S)
            assert before.items() - hosts(place).items(), "some are others"
            assert place.dlctl("stop").code == 0
            assert driver.wait(LONG_S) == 0, "they end with the run"
        finally:
            driver.kill()
    assert place.dlctl("verify").code == 0
