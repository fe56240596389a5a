"""The reader of job files: whatever stands in one, the outcome is a job or a list of its faults."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgpack

from dlctl import registry
from dlctl.errors import UsageError
from dlctl.job import config
from dlctl.jobfile import JobFileError, load, reading
from dlctl.jobfile.positions import PARTS_MAX, find_keys
from dlctl.jobfile.reading import SIZE_MAX_BYTES
from dlctl.launch import launcher

from . import mutation, trees
from .harmless import check_harmless
from .scratch import scratch

NAME = "jobfile"
MEMORY_BYTES = 4_000_000
MEMORY_PER_BYTE = 500
"""`tomllib` makes a dict of a table header of four bytes, and a line's place is kept for each key.
"""
FAULT_CHARS_MAX = 40_000
_MINIMAL = '[job]\nname = "digits"\ntask = "train.py:task"\n'
_PARAMETERS = (
    '[[parameters]]\nmatch = ["*.bias", "n[or]m?"]\nweight_decay = 0.5\nlr_scale = 1e3\n'
    '[[parameters]]\nmatch = ["*"]\ntrain = false\n'
)
_HOSTS = """
[[hosts]]
servers = 1
[[hosts]]
ssh = "gpu-1"
data = "192.0.2.1"
workers = 2
dir = "/var/tmp/dlctl"
"""
_SLURM = '\n[slurm]\nnodes = 2\ntime = "2h"\nextra = ["--exclusive"]\n'
_LAUNCHER = _SLURM.replace("[slurm]", '[launcher]\nname = "slurm"')
_VALUES = [
    "0", "-1", "1", "4097", "9223372036854775807", "9223372036854775808", "1" + "0" * 400,
    "0x" + "f" * 5000, "0o17", "1_0", "1.0", "-0.0", "0.5", "1e308", "1e400", "nan", "-inf",
    "true", "false", '""', '"a"', '"none"', '"\\u0000"', '"\\u202e"', "'''a\nb'''", "1979-05-27",
    "07:32:00", "[]", "[1]", "[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]", "{}", "{ a = 1 }",
    "{ name = 1 }", '"../../x.py:task"', '"a.py:b.c"', f'"{"a" * 300}.py:task"', '"off"', '"1B/s"',
    '"1e999GB/s"', '"accuracy >= 0.85"', '"a > 1e999"', '"/tmp"', "[" * 1000, "{a=" * 400,
    '"' + "a" * 20_000 + '"',
]  # fmt: skip
_TOKENS = [
    token.encode()
    for token in (
        *_VALUES, "=", "[", "]", "[[", "]]", "{", "}", ",", ".", "\n", "\r\n", "#", '"', "'", '"""',
        "'''", "\\", "\\U0001F600", "\ufeff", "\x1b[31m", "\u202e", "a.b.c = 1\n", "[job]\n",
        "[[job]]\n", "!!python/object", "\x00", "é" * 30,
    )
]  # fmt: skip


# ---------------------------------------------------------------- what is tried


def seeds() -> list[bytes]:
    """A short job, and for every algorithm, optimizer and compressor one with every key."""
    everything = [
        _whole(**{section: name})
        for section, kind in registry.SECTIONS.items()
        for name in registry.names(kind)
    ]
    windows = b"\xef\xbb\xbf" + _MINIMAL.replace("\n", "\r\n").encode()
    inline = 'job = { name = "a", task = "train.py:task", stop = { steps = 5 } }\n'
    more = [_MINIMAL + part for part in (_HOSTS, _PARAMETERS, _SLURM, _LAUNCHER)]
    texts = [_MINIMAL, inline, *more, *everything]
    return [windows, *(text.encode() for text in texts)]


def _whole(**names: str) -> str:
    """A job file in which every key stands, with its default."""
    chosen = {"algorithm": "downpour", "optimizer": "sgd", "compression": "none", **names}
    job = config.to_dict(config.JobFile(job=config.Job(name="digits", task="train.py:task")))
    for section, name in chosen.items():
        options = registry.load(registry.SECTIONS[section], name).Options()
        job[section] = {"name": name, **dataclasses.asdict(options)}
    job["launcher"] = {"name": "local"}
    tables = {section: table for section, table in job.items() if isinstance(table, dict)}
    return "".join(f"[{section}]\n{_keys(table)}" for section, table in tables.items())


def _keys(table: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in table.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inner = (f"{key} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {', '.join(inner)} }}"
    return json.dumps(value)


@cache
def _known_keys() -> list[bytes]:
    lines = b"".join(seeds()).split(b"\n")
    return sorted({line.partition(b"=")[0].strip() for line in lines if line.strip()})


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    if random.random() < 0.4:
        return mutation.mutate(random, data, other, _TOKENS)
    lines, others = data.split(b"\n"), other.split(b"\n")
    for _ in range(mutation.few(random)):
        _change_line(random, lines, others)
    return b"\n".join(lines)[: mutation.SIZE_MAX_BYTES]


def _change_line(random: Random, lines: list[bytes], others: list[bytes]) -> None:
    at = random.randrange(len(lines))
    key, equals, _ = lines[at].partition(b"=")
    choice = random.randrange(8)
    if choice < 3 and equals:
        lines[at] = key + b"= " + random.choice(_VALUES).encode()
    elif choice == 3:
        lines.insert(at, random.choice(others))
    elif choice == 4:
        lines[at] = random.choice(_known_keys())
    elif choice == 5:
        new = random.choice(_known_keys()) + b" = " + random.choice(_VALUES).encode()
        lines.insert(at, new)
    elif choice == 6 and len(lines) > 1:
        del lines[at]
    else:
        count = random.choice((2, 2, 10, 10, 100, 2000 if random.random() < 0.05 else 1))
        lines[at:at] = [_numbered(lines[at], number) for number in range(count)]


def _numbered(line: bytes, number: int) -> bytes:
    """The same line with another key."""
    return line.replace(b"[", b"[x%d." % number, 1) if b"[" in line else b"x%d" % number + line


# ---------------------------------------------------------------- what must hold


@cache
def _path() -> Path:
    directory = scratch("jobs")
    (directory / "train.py").touch()
    return directory / "job.toml"


def target(data: bytes) -> None:
    """A job that can be written, read and sent, or an error that names lines of the file."""
    path = _path()
    path.write_bytes(data)
    _check_places(data)
    try:
        job = load(path)
    except JobFileError as error:
        _check_faults(error, data)
        return
    except UsageError as error:
        check_harmless(str(error))
        return
    assert len(data) <= SIZE_MAX_BYTES
    document = config.to_dict(job)
    text = json.dumps(document, allow_nan=False)
    assert config.from_dict(config.JobFile, json.loads(text)) == job
    msgpack.packb(document)
    for section, kind in registry.SECTIONS.items():
        choice = getattr(job, section)
        entry = registry.load(kind, choice.name)
        entry.Options(**choice.options)
    assert launcher.of(job).places() == job.launcher.places
    assert all(text not in document["job"]["name"] for text in trees.TEXTS[2:7])


def _check_places(data: bytes) -> None:
    """Every key of valid TOML is found, so that a fault has its line."""
    try:
        text = data.decode("utf-8-sig")
        document = reading.parse(_path(), text)
    except (UnicodeDecodeError, JobFileError):
        return
    found = find_keys(text)
    if "\\" in text or len(found) > 10_000:
        return  # Keys with escapes stay escaped; of very many only the first are known.
    lines = text.split("\n")
    for path in _paths(document):
        assert path in found, f"no place for {path}"
        place = found[path].key
        assert lines[place.line - 1][place.start : place.end].strip()


def _paths(document: dict[str, Any]) -> Iterator[tuple[str | int, ...]]:
    """The path of every key, as far as places are noted."""
    pending: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while pending:
        path, node = pending.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            here = (*path, key)
            if isinstance(key, str) and len(here) < PARTS_MAX:
                yield here
            if isinstance(value, dict | list):
                pending.append((here, value))


def _check_faults(error: JobFileError, data: bytes) -> None:
    check_harmless(str(error))
    assert len(str(error)) < FAULT_CHARS_MAX, f"{len(str(error))} characters of faults"
    assert error.problems
    lines = data.decode("utf-8-sig", "replace").split("\n")
    for problem in error.problems[:200]:
        assert problem.message
        if problem.line is not None:
            line = lines[problem.line - 1]
            assert problem.source in ("", line.removesuffix("\r"))
            assert 0 <= problem.column <= len(line)
        json.dumps(problem.to_dict())
