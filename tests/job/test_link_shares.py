"""Shares of the model by the bandwidths of hosts, against a linear program."""

from __future__ import annotations

import numpy as np
import pytest

from dlctl.job.link_shares import HostLink, Kind, round_time, shares

CASES = 100


def drawn(case: int) -> list[HostLink]:
    """Hosts of all kinds: equal, fast and slow; with workers, servers, or both."""
    rng = np.random.default_rng([7, case])
    count = int(rng.integers(1, 9))
    bandwidths = rng.choice([rng.uniform(0.1, 10, count), 10.0 ** rng.integers(-2, 3, count)])
    workers = rng.choice([np.ones(count, int), rng.integers(0, 4, count)])
    serves = rng.random(count) < rng.choice([0.5, 0.9, 1.0])
    serves[rng.integers(count)] = True
    return [
        HostLink(float(b), int(m), bool(s))
        for b, m, s in zip(bandwidths, workers, serves, strict=True)
    ]


def least_time(links: list[HostLink], kind: Kind) -> float:
    """By scipy's HiGHS: minimise t; every link's load is at most its bandwidth times t."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    count, total = len(links), sum(link.workers for link in links)
    rows: list[tuple[int, float, float, float]] = []
    """(host, factor of its share, constant, bandwidth)"""
    for i, (b, m, _) in enumerate(links):
        out, come = (-m, m), (total - m, 0)
        both = (out[0] + come[0], out[1] + come[1])
        rows += [(i, *way, b) for way in ([both] if kind == "shared" else [out, come])]
    matrix = np.zeros((len(rows), count + 1))
    for row, (i, factor, _, b) in enumerate(rows):
        matrix[row, [i, count]] = factor / b, -1
    found = linprog(
        np.eye(count + 1)[-1], matrix, [-c / b for _, _, c, b in rows],
        np.append(np.ones(count), 0)[None], [1],
        [(0, 1 if link.serves else 0) for link in links] + [(0, None)], method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )  # fmt: skip
    assert found.success, found.message
    return float(found.fun)


@pytest.mark.oracle("target-batch", "scipy's linprog: the least time of a round, 400 link vectors")
@pytest.mark.parametrize("kind", ["each way", "shared"])
def test_no_other_shares_are_faster(kind: Kind, agree) -> None:
    for case in range(CASES):
        links = drawn(case)
        found = shares(links, kind)
        assert sum(found) == pytest.approx(1, abs=1e-12)
        assert min(found) >= 0
        assert not any(share for share, link in zip(found, links, strict=True) if not link.serves)
        agree(round_time(links, found, kind), least_time(links, kind), rtol=1e-12, atol=1e-14)


def formula(bandwidths: list[float]) -> list[float]:
    """Of DeDLOC's problem, all peers alike but for their bandwidths."""
    n, ordered = len(bandwidths), sorted(bandwidths, reverse=True)
    xis = [(n - 2 + k) / sum(ordered[:k]) for k in range(1, n + 1)]
    xi = [xi for xi, b in zip(xis, ordered, strict=True) if xi * b > 1][-1]
    return [max(0.0, (xi * b - 1) / (n - 2)) for b in bandwidths]


@pytest.mark.oracle("target-batch", "the closed form of the shares, one worker on each host")
def test_with_a_worker_on_each_host_they_are_the_closed_form(agree) -> None:
    rng = np.random.default_rng(1)
    for _ in range(1000):
        bandwidths = [float(b) for b in rng.uniform(0.05, 10, int(rng.integers(3, 12)))]
        links = [HostLink(b) for b in bandwidths]
        found = shares(links, "shared")
        agree(found, formula(bandwidths), rtol=1e-9, atol=1e-12)
        equal = [1 / len(links)] * len(links)
        gain = round_time(links, equal, "shared") / round_time(links, found, "shared")
        assert 1 - 1e-12 <= gain <= 2 - 2 / len(links) + 1e-12


@pytest.mark.parametrize("kind", ["each way", "shared"])
def test_hosts_that_only_serve_get_shares_like_their_bandwidths(kind: Kind) -> None:
    servers = [HostLink(b, workers=0) for b in (10.0, 10.0, 1.0, 1.0)]
    links = [*servers, *[HostLink(100.0, serves=False)] * 4]
    found = shares(links, kind)
    np.testing.assert_allclose(found[:4], np.array([10, 10, 1, 1]) / 22)
    assert found[4:] == [0.0] * 4


def test_two_hosts_share_like_their_bandwidths() -> None:
    np.testing.assert_allclose(shares([HostLink(3.0), HostLink(1.0)], "shared"), [0.75, 0.25])


def test_with_a_rate_for_each_direction_equal_shares_are_best() -> None:
    """The slowest host sends what it does not serve, or receives what it serves."""
    links = [HostLink(b) for b in (10.0, 10.0, 1.0, 1.0)]
    found = shares(links, "each way")
    np.testing.assert_allclose(found, [0.25] * 4)
    assert round_time(links, found, "each way") == pytest.approx(0.75)
    only_fast = [0.5, 0.5, 0.0, 0.0]
    assert round_time(links, only_fast, "each way") == pytest.approx(1.0)
    assert round_time(links, only_fast, "shared") == pytest.approx(1.0)
    assert round_time(links, found, "shared") == pytest.approx(1.5)


def test_a_share_that_is_too_small_goes_to_the_others_which_still_count_its_worker() -> None:
    links = [HostLink(b) for b in (10.0, 9.0, 7.0)]
    small = min(shares(links, "shared"))
    assert small > 0
    found = shares(links, "shared", least=1.01 * small)
    assert found == shares([*links[:2], links[2]._replace(serves=False)], "shared")
    assert shares(links[:1], "shared", least=2.0) == [1.0], "somebody has to serve"
