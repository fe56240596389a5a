"""A quota of the kernel's counts like cores that are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlctl.util import cores, threads

V1 = "4:memory:/job/7\n2:cpuacct:/\n1:cpu,cpuacct:/job/7\n0::/\n"
V2 = "0::/system.slice/run-7.scope\n"


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("allowed", "period", "found"),
    [
        ("200000", "100000", 2.0),
        ("150000\n", "100000\n", 1.5),
        ("max", "100000", None),
        ("-1", "100000", None),
        ("100000", "0", None),
        ("", "", None),
        ("much", "more", None),
    ],
)
def test_a_quota_is_so_many_cores(allowed: str, period: str, found: float | None) -> None:
    assert cores.quota(allowed, period) == found


@pytest.mark.parametrize(
    ("here", "quotas", "usable"),
    [(64, [], 64), (64, [2.0], 2), (64, [1.5], 2), (64, [0.2], 1), (2, [8.0], 2), (8, [6, 3], 3)],
)
def test_the_fewest_cores_count(here: int, quotas: list[float], usable: int) -> None:
    assert cores.within(here, quotas) == usable


def test_groups_that_may_limit_cores_are_known_by_their_controllers() -> None:
    assert list(cores.groups(V1, "cpu")) == [(1, "job/7"), (2, "")]
    assert list(cores.groups(V2, "cpu")) == [(2, "system.slice/run-7.scope")]
    assert list(cores.groups("0::/../elsewhere\n", "cpu")) == [(2, "")]
    assert list(cores.groups("?\n\n0:\n", "cpu")) == []
    assert list(cores.groups("", "cpu")) == []


def test_a_quota_of_version_2_counts_wherever_above_it_is(tmp_path: Path) -> None:
    place = "sys/fs/cgroup/system.slice"
    root = put(
        tmp_path,
        {
            "proc/self/cgroup": V2,
            f"{place}/run-7.scope/cpu.max": "max 100000\n",
            f"{place}/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/cpuset.cpus": "0-63\n",
        },
    )
    assert list(cores.quotas(root)) == [3.5]


def test_a_quota_of_version_1_is_found_in_a_container_that_sees_paths_of_its_host(
    tmp_path: Path,
) -> None:
    place = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        "proc/self/cgroup": V1,
        f"{place}/cpu.cfs_quota_us": "200000\n",
        f"{place}/cpu.cfs_period_us": "100000\n",
    }
    assert list(cores.quotas(put(tmp_path, files))) == [2.0]
    inner = {f"{place}/job/7/cpu.cfs_quota_us": "-1", f"{place}/job/7/cpu.cfs_period_us": "100000"}
    assert list(cores.quotas(put(tmp_path, inner))) == [2.0]
    assert list(cores.quotas(tmp_path / "nowhere")) == []


def test_threads_are_no_more_than_the_quota_lets_run(monkeypatch) -> None:
    here = len(os.sched_getaffinity(0))
    assert 1 <= cores.usable() <= here
    monkeypatch.setattr(cores, "quotas", lambda root: iter([1.0]))
    threads.threads.cache_clear()
    try:
        assert threads.threads() == 1
    finally:
        threads.threads.cache_clear()
