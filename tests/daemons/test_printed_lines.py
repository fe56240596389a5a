"""What becomes of printed bytes, in virtual time: lines, unfinished ones, progress bars, floods."""

from __future__ import annotations

import math

import pytest

from daemons.log_file import LINE_CHARS_MAX
from daemons.worker.task import printed_lines
from daemons.worker.task.printed_lines import BAR_S, BYTES_PER_S_MAX, MOMENT_S, Limit, Lines


def lines_of(*parts: bytes) -> list[str]:
    """Of a stream that got these bytes in these pieces, and then ended."""
    lines = Lines()
    return [line for part in parts for line in lines.feed(part, 0.0)] + lines.end()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((b"a\nb\n",), ["a", "b"]),
        ((b"a", b"b\nc", b"\n"), ["ab", "c"]),
        ((b"\n", b"  \n"), ["", "  "]),
        ((b"a\r\n", b"b\r", b"\n"), ["a", "b"]),
        ((b"caf\xe9 \xc3", b"\xa9\n"), ["caf\\xe9 \u00e9"]),
        ((b"nul \0 and \x1b[31mred\n",), ["nul \0 and \x1b[31mred"]),
        ((b"unfinished",), ["unfinished"]),
        ((b"\r 10%", b"\r 20%", b"\r 100%\n", b"end\n"), [" 100%", "end"]),
        ((b"10%\r", b"20%\r", b"end\n"), ["end"]),
        ((b"10%\r", b"20%\r"), ["20%"]),
        ((b"\r 100%\r       \r\n",), [" 100%"]),
        ((b"\r     \r", b"\n"), [""]),
        ((b"x" * 5 * LINE_CHARS_MAX, b"x\ny\n"), ["x" * LINE_CHARS_MAX, "y"]),
    ],
)
def test_lines_are_what_a_terminal_would_leave_on_its_screen(parts, expected):
    assert lines_of(*parts) == expected
    data = b"".join(parts)
    nbytes = 1 + len(data) // 1000  # One by one, unless there are many.
    assert lines_of(*(data[at : at + nbytes] for at in range(0, len(data), nbytes))) == expected


def test_an_unfinished_line_is_a_line_after_a_moment_and_its_end_adds_no_empty_one():
    lines = Lines()
    assert lines.due == math.inf
    assert lines.feed(b"loading", 1.0) == []
    assert lines.feed(b" ...", 1.5) == []
    assert lines.due == 1.5 + MOMENT_S
    assert lines.end() == ["loading ..."]
    assert lines.due == math.inf
    assert lines.feed(b"\n\nnext\n", 9.0) == ["", "next"]
    assert lines.feed(b"half", 9.0) == []
    assert lines.end() == ["half"]
    assert lines.feed(b" done\n", 12.0) == [" done"]


def test_a_progress_bar_of_an_hour_gives_a_line_each_ten_seconds_and_its_last_state():
    lines, shown = Lines(), []
    for tick in range(36_000):
        now = tick / 10
        assert lines.feed(b"\r%d of 36000" % tick, now) == []
        if lines.due <= now:
            shown += lines.end()
    last = lines.feed(b"\r36000 of 36000\n", 3600.0)
    assert last == ["36000 of 36000"]
    assert len(shown) == pytest.approx(3600 / BAR_S, rel=0.05)
    assert shown[0] == f"{BAR_S * 10:.0f} of 36000"


def test_a_progress_bar_takes_no_memory_for_what_is_overwritten():
    lines = Lines()
    for tick in range(10_000):
        lines.feed(b"\r%100d" % tick, 0.0)
        assert len(lines._begun) < 300


def test_a_flood_is_limited_to_a_rate_and_what_is_dropped_is_counted():
    limit, lines, kept, dropped = Limit(0.0), Lines(), 0, 0
    chunk = (b"x" * 79 + b"\n") * 800  # 64 KB
    for tick in range(20_000):  # 128 MB/s for 10 s
        now = tick / 2000
        if limit.is_over(now):
            dropped += lines.skip(chunk, now)
        else:
            new = lines.feed(chunk, now)
            limit.spend(new)
            kept += len(new)
    assert kept + dropped == 20_000 * 800
    line_bytes = 79 + printed_lines.LINE_OVERHEAD_BYTES
    may = printed_lines.BURST_BYTES_MAX + 10 * BYTES_PER_S_MAX
    assert kept * line_bytes == pytest.approx(may, rel=0.1)


@pytest.mark.long
def test_ten_thousand_lines_a_second_are_no_flood():
    limit, lines = Limit(0.0), Lines()
    for tick in range(36_000):
        assert not limit.is_over(tick / 100)
        limit.spend(lines.feed(b"step 12345: loss 0.1234, accuracy 0.9, lr 0.001\n" * 100, tick))


def test_after_a_flood_lines_begin_where_a_line_begins():
    lines = Lines()
    assert lines.feed(b"kept\ncut", 0.0) == ["kept"]
    assert lines.skip(b" here\nand\nthe", 0.0) == 2
    assert lines.feed(b" rest\n", 0.0) == ["the rest"]
