"""Rates: nothing is shown before there was something to measure, and nothing jumps about."""

from __future__ import annotations

from dlctl.roles.protocol.meters import Pace, Rates
from dlctl.util.names import LINKS
from dlctl.wire import codec
from dlctl.wire import messages as m


def test_there_is_no_pace_before_the_first_portion_is_done() -> None:
    pace = Pace(2.0)
    assert [pace.look(now, (0,)) for now in (0.0, 0.5, 1.0, 30.0)] == [None] * 4
    assert pace.look(40.0, (320,)) == (8.0,), "measured from the beginning of the work"


def test_a_steady_pace_is_steady_from_look_to_look() -> None:
    pace = Pace(2.0)
    shown = [pace.look(n / 2, (50 * n, 1600 * n)) for n in range(20)]
    assert shown[0] is None
    assert set(shown[1:]) == {(100.0, 3200.0)}


def test_a_pace_follows_a_change_within_its_window() -> None:
    pace = Pace(2.0)
    fast = [pace.look(n / 2, (100 * n,)) for n in range(9)]
    slow = [pace.look(4 + n / 2, (800 + 10 * n,)) for n in range(1, 6)]
    assert fast[-1] == (200.0,)
    assert [rates[0] for rates in slow if rates] == sorted((r[0] for r in slow if r), reverse=True)
    assert slow[-1] == (20.0,)


def test_portions_that_take_longer_than_the_window_are_no_row_of_zeros_and_peaks() -> None:
    """160 samples every ten seconds, looked at twice a second."""
    pace = Pace(2.0)
    shown = [pace.look(n / 2, (160 * (n // 20),)) for n in range(100)]
    assert shown[:20] == [None] * 20
    assert set(shown[20:]) == {(16.0,)}


def test_a_pace_is_zero_when_nothing_comes_for_twice_as_long() -> None:
    pace = Pace(2.0)
    for n in range(5):
        pace.look(float(n), (n,))
    assert pace.look(8.0, (4,)) == (1.0,)
    assert pace.look(8.1, (4,)) == (0.0,)
    assert pace.look(9.0, (5,)) == (0.2,), "one in the five seconds since the one before"


def test_what_was_never_counted_has_no_rate() -> None:
    rates = Rates("samples", "refused")
    rates.report(0.0)
    assert rates.report(1.0) == {"samples": 0, "refused": 0}
    rates.add("samples", 64)
    assert rates.report(2.0) == {"samples": 64, "refused": 0, "samples_per_s": 32.0}
    assert rates.report(7.0)["samples_per_s"] == 0.0, "that it stands still now was measured"


def test_a_report_has_room_for_the_traffic_with_any_number_of_peers() -> None:
    rates = Rates("push_bytes", "fetch_bytes")
    for index in range(4096):
        rates.add("push_bytes", 2**40, f"worker-{index}")
        rates.add("fetch_bytes", 2**40, f"worker-{index}")
    assert rates.total["push_bytes"] == 4096 * 2**40
    assert rates.of_peers["worker-0"] == {"push_bytes": 2**40, "fetch_bytes": 2**40}
    links = {peer: [*of.values()] for peer, of in rates.of_peers.items()}
    (header,) = codec.encode(m.Report("worker-0", 1, "computing", "", {LINKS: links}))
    assert len(header) < codec.HEADER_BYTES_MAX * 0.6
