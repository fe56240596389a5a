"""A link of some Gbit/s: the loopback of a network namespace, with a token bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.hosts.cluster import Cluster


@contextmanager
def link(gbit_per_s: int) -> Iterator[Cluster]:
    """Both directions share it. Requires what `tests.hosts.cluster.missing` checks."""
    limit = ("tbf", "rate", f"{gbit_per_s}gbit", "burst", "2mb", "latency", "50ms")
    with Cluster(count=0) as lab:
        shaped = lab.run("tc", "qdisc", "add", "dev", "lo", "root", *limit)
        if shaped.returncode:
            raise RuntimeError(f"the loopback cannot be shaped: {shaped.stderr}")
        yield lab
