"""Which part of the model each host should serve, by the rates of the hosts' links, so that an
exchange of all parameters takes as short as possible.

In a round every worker pushes d elements to the servers, and then fetches d. With M workers in all,
of which m_i are on host i, with its share w_i of the model and its bandwidth b_i, in units of d:

    leaves host i while all push:  m_i (1 - w_i)        arrives at it:  (M - m_i) w_i

and the other way round while all fetch. What a host's workers exchange with its own server is on no
link. A round takes the time of the slowest host; `shares` minimises it. There are two kinds of
links:

- "each way": both directions have the rate b_i, as with a switch. Then a host takes max(m_i (1 -
  w_i), (M - m_i) w_i) / b_i. With one worker on each host, equal shares are the best ones whatever
  the bandwidths: the slowest host takes (n - 1) / n at least. Bandwidths matter for hosts that
  serve and do not train (w ~ b), and for those that do not serve.
- "shared": both directions together have the rate b_i, as on a wireless link; or the pushes and
  fetches of a round overlap, as in an all-reduce of many small parts. Then it takes
  (m_i + (M - 2 m_i) w_i) / b_i. With one worker on each of n hosts that is (1 + (n - 2) w_i) / b_i,
  which is the problem of DeDLOC (Diskin et al., NeurIPS 2021, section 3.2) and of hivemind's
  `load_balance_peers`. Sorted by descending bandwidth, with xi_k = (n - 2 + k) / (b_1 + ... + b_k)
  and K the largest k with xi_k b_k > 1, the shares are w_i = max(0, (xi_K b_i - 1) / (n - 2)), and
  the time is max(xi_K, 1 / b_min). It is at least n / (2 n - 2) of that with equal
  shares: two thirds with four hosts.

The least time seldom determines all shares. Of the best ones, the shares are the most even ones for
the links' load: each host serves as much as keeps its link below a common level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Kind = Literal["each way", "shared"]
HALVINGS = 200
"""Of an interval between two floats that are some powers of ten apart: down to neighbours."""


class HostLink(NamedTuple):
    """A host, and its link to all others."""

    bandwidth: float
    """In any unit, above zero."""
    workers: int = 1
    serves: bool = True
    """Whether it may have a share."""


class _Limits(NamedTuple):
    """What the share of a host may be, if a round takes no longer than some time."""

    least: float
    most: float


def shares(links: Sequence[HostLink], kind: Kind, *, least: float = 0.0) -> list[float]:
    """The share of each host, at least zero; they add up to 1. Some host has to serve.

    least: hosts with a smaller share get none, as long as others are left; the smallest one first.
    """
    assert any(link.serves for link in links), "no host serves"
    assert all(link.bandwidth > 0 for link in links), "a link without bandwidth"
    while True:
        found = _best(links, kind)
        smallest = min(share for share in found if share > 0)
        if smallest >= least or smallest == max(found):
            return found
        left_out = found.index(smallest)
        links = [
            link._replace(serves=link.serves and index != left_out)
            for index, link in enumerate(links)
        ]


def round_time(links: Sequence[HostLink], given: Sequence[float], kind: Kind) -> float:
    """The time of a push by all workers, in d / bandwidth; their fetch takes the same."""
    total = sum(link.workers for link in links)
    return max(
        _load(link, share, total, kind) / link.bandwidth
        for link, share in zip(links, given, strict=True)
    )


def _load(link: HostLink, share: float, total: int, kind: Kind) -> float:
    out, come = link.workers * (1 - share), (total - link.workers) * share
    return out + come if kind == "shared" else max(out, come)


def _best(links: Sequence[HostLink], kind: Kind) -> list[float]:
    total = sum(link.workers for link in links)

    def at(time: float) -> list[_Limits]:
        return [_limits(link, time, total, kind) for link in links]

    def is_possible(time: float) -> bool:
        limits = at(time)
        ordered = all(limit.least <= limit.most for limit in limits)
        return ordered and sum(x.least for x in limits) <= 1 <= sum(x.most for x in limits)

    longest = max(2.0 * max(total, 1) / link.bandwidth for link in links)
    limits = at(_least(is_possible, longest))

    def filled(level: float) -> list[float]:
        """The shares, if each link carries no more than `level` of its bandwidth."""
        wanted = (_served_at(link, level, total, kind) for link in links)
        return [
            min(max(share, limit.least), limit.most)
            for share, limit in zip(wanted, limits, strict=True)
        ]

    highest = max(2.0 * max(total, 1) / link.bandwidth for link in links if link.serves)
    found = filled(_least(lambda level: sum(filled(level)) >= 1, highest))
    whole = sum(found)
    return [share / whole for share in found]


def _limits(link: HostLink, time: float, total: int, kind: Kind) -> _Limits:
    """The shares with which this link takes no longer than `time`. None: least > most."""
    own, others, room = link.workers, total - link.workers, time * link.bandwidth
    if not link.serves:
        return _Limits(0.0, 0.0) if own <= room else _Limits(1.0, 0.0)
    if kind == "each way":
        least = max(0.0, 1 - room / own) if own else 0.0
        return _Limits(least, min(1.0, room / others) if others else 1.0)
    slope = others - own
    if slope > 0:
        return _Limits(0.0, min(1.0, (room - own) / slope))
    least = (own - room) / -slope if slope else 2.0 * (own > room)
    return _Limits(max(0.0, least), 1.0)


def _served_at(link: HostLink, level: float, total: int, kind: Kind) -> float:
    """The share that makes the load of this link `level`; it increases with that."""
    if not link.serves:
        return 0.0
    own, others, room = link.workers, total - link.workers, level * link.bandwidth
    if kind == "shared" and others > own:
        return max(0.0, (room - own) / (others - own))
    return room / max(others, 1)


def _least(holds: Callable[[float], bool], most: float) -> float:
    """The least number up to `most` for which it holds; from there on it does."""
    low, high = 0.0, most
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
