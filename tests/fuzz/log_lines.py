"""Logs: what daemons and users' code wrote, read in all the ways there are, and shown.

An input is the bytes of a log file. A terminal must get no character that steers it, whatever the
lines hold, and a program that reads JSON must get JSON.
"""

from __future__ import annotations

import io
import json
import logging
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from daemons import log_tail
from daemons.logs import JsonLines
from dlctl.cli.ui import console, log_lines
from dlctl.runs import logs

from . import mutation, trees
from .harmless import check_harmless
from .scratch import scratch

NAME = "logs"
MEMORY_BYTES = 6_000_000
MEMORY_PER_BYTE = 400
WORKER = "worker-0"
ESCAPED_BYTES = 4096
"""Of each input, as one text; every line is escaped besides."""
_TOKENS = [
    token.encode("utf-8", "surrogatepass")
    for token in (
        "\n", "\r\n", "\r", "\x1b[31m", "\x1b]0;x\a", "\x9b31m", "\u202e", "\u2066", "\u200b", "\0",
        "\u2028", "\x85", "\x08", "\x7f", "\ud800", "\U000e0001", "\u3000", "{", "}", '"', "null",
        '{"msg": "x"}\n', '{"msg": "\\ud800\\u001b"}', "[" * 2000, '{"a":' * 900, "NaN", "1e999",
        '"ts": "0001-01-01T00:00:00+23:59"', "exit 0: ", "Traceback (most recent call last):",
    )
] + [b"\x80", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"]  # fmt: skip
_TIMES = (
    "2025-06-15T15:06:40.000Z", "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59", "9999-12-31T23:59:59", "1969-12-31", "20250615T150640", "x", "",
)  # fmt: skip


# ---------------------------------------------------------------- what is tried


def seeds() -> list[bytes]:
    """Lines as daemons write them, and as libraries and crashing interpreters do."""
    lines = [
        {"level": "info", "msg": "at work", "step": 12},
        {"level": "warning", "msg": "behind by 6 steps", "peers": ["worker-1"], "rate": 0.5},
        {"level": "error", "msg": "training failed", "detail": "Traceback:\n  x\nValueError: y"},
        {"level": "critical", "msg": "exit 1: failed", "nested": {"a": [1, {"b": None}]}},
    ]
    heads = [{"ts": time, "name": WORKER, "inc": 1} for time in _TIMES]
    as_json = [json.dumps(heads[0] | line).encode() for line in lines]
    times = [json.dumps(head | lines[0]).encode() for head in heads]
    raw = [b"Traceback (most recent call last):", b'  File "x"', b"50%\r 60%\r 70%", b"\xff\x00"]
    return [b"\n".join(kind) + b"\n" for kind in (as_json, times, raw, [*as_json, *raw])]


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    if random.random() < 0.4:
        return mutation.mutate(random, data, other, _TOKENS)
    lines, others = data.split(b"\n"), other.split(b"\n")
    for _ in range(mutation.few(random)):
        at = random.randrange(len(lines))
        lines[at] = _change_line(random, lines[at], random.choice(others))
    if random.random() < 0.2:
        lines.insert(random.randrange(len(lines)), random.choice(others))
    return b"\n".join(lines)[: mutation.SIZE_MAX_BYTES]


def _change_line(random: Random, line: bytes, other: bytes) -> bytes:
    try:
        tree = trees.mutate(random, json.loads(line), {"a": [1, {}]})
        if isinstance(tree, dict) and random.random() < 0.2:
            tree["ts"] = random.choice(_TIMES)
        text = json.dumps(tree, ensure_ascii=random.random() < 0.5)
    except (ValueError, RecursionError, TypeError):
        return mutation.mutate(random, line, other, _TOKENS)
    return trees.deep_json(random, text).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- what must hold


@cache
def _directory() -> Path:
    directory = scratch("run")
    (directory / "logs").mkdir()
    return directory


def target(data: bytes) -> None:
    """Every reader brings the same lines, and nothing harmful is shown of them."""
    directory = _directory()
    path = directory / "logs" / f"{WORKER}.1.jsonl"
    path.unlink(missing_ok=True)
    follower = logs.Follower(directory, [WORKER])
    path.write_bytes(data)
    (file,) = logs.list_files(directory)[WORKER]
    lines = list(logs.read(file))
    _check_readers(follower, file, lines)
    _check_last_words(directory, path)
    console.setup(color="never")
    for line in lines:
        _check_line(line)
    for shape in ("text", "json"):
        _check_shown(log_lines.Printer([WORKER], shape), lines)
    _check_escape(data[:ESCAPED_BYTES].decode("utf-8", "surrogateescape"))
    _check_written(data.decode("utf-8", "replace"))


def _check_readers(follower: logs.Follower, file: logs.LogFile, lines: list[logs.Line]) -> None:
    raw = [line.raw for line in lines]
    for last in (0, 1, 3):
        found = [line.raw for line in logs.tail([file], last)]
        assert found == (raw[-last:] if last else [])
    followed = [*follower.poll(), *follower.rest()]
    assert [line.raw for line in followed] == raw
    assert logs.in_order(lines) == lines


def _check_last_words(directory: Path, path: Path) -> None:
    assert len(logs.last_log_lines(directory, WORKER)) <= 10
    last = log_tail.last_lines(path)
    assert len(last) <= log_tail.LINES
    assert all(len(line) <= log_tail.LINE_CHARS_MAX for line in last)
    code = log_tail.exit_code(path)
    assert code is None or 0 <= code < 1000


def _check_line(line: logs.Line) -> None:
    assert line.level == logs.TEXT or line.raw.startswith("{")
    assert 0 <= line.severity < len(logs.LEVELS)
    json.dumps(log_lines.as_data(line))


def _check_shown(printer: log_lines.Printer, lines: list[logs.Line]) -> None:
    with redirect_stdout(io.StringIO()) as shown:
        printer.show(lines)
    check_harmless(shown.getvalue())
    if printer.shape == "json":
        rows = shown.getvalue().splitlines()
        assert len(rows) == len(lines)
        assert all(json.loads(row)["name"] == WORKER for row in rows)


def _check_escape(text: str) -> None:
    escaped = console.escape(text)
    check_harmless(escaped)
    assert "\n" not in escaped
    assert console.escape(escaped) == escaped
    assert console.escape_lines(text).count("\n") == text.count("\n")
    check_harmless(console.escape_lines(text))


def _check_written(text: str) -> None:
    """What a daemon logs is one line, and is read as it was written."""
    record: Any = logging.makeLogRecord(
        {"name": "dlctl", "levelname": "INFO", "msg": "%s", "args": (text,), "step": text[:50]}
    )
    written = JsonLines(WORKER, 1).format(record)
    assert "\n" not in written
    line = logs.parse(written, WORKER, 1, 0.0)
    assert line.text == record.getMessage()[:16384]
    assert line.fields == {"step": text[:50]}
