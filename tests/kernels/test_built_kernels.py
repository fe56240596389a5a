"""A library that is not exactly what was built from this source is never loaded."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dlctl import kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: None) -> Path:
    """An empty place for them, with the source alone."""
    for name in ("SOURCE", "LIBRARY", "RECORD"):
        monkeypatch.setattr(kernels, name, tmp_path / getattr(kernels, name).name)
    shutil.copy(ROOT / "dlctl" / "kernels" / "kernels.c", kernels.SOURCE)
    return tmp_path


def record(source: str, library: str) -> None:
    kernels.RECORD.write_text(json.dumps({"source": source, "library": library}))


def test_without_a_library_numpy_computes(folder: Path) -> None:
    assert "compiler" in kernels.missing()
    assert kernels.step("adagrad") is None


def test_a_damaged_library_is_not_loaded(folder: Path) -> None:
    kernels.LIBRARY.write_bytes(b"as it was built")
    record(kernels.digest(kernels.SOURCE), kernels.digest(kernels.LIBRARY))
    kernels.LIBRARY.write_bytes(b"as it was")
    assert "damaged" in kernels.missing()


def test_a_library_of_another_source_is_not_loaded(folder: Path) -> None:
    kernels.LIBRARY.write_bytes(b"as it was built")
    record(kernels.digest(kernels.SOURCE), kernels.digest(kernels.LIBRARY))
    with kernels.SOURCE.open("a") as file:
        file.write("/* changed */\n")
    assert "another version" in kernels.missing()


@pytest.mark.parametrize("text", ["", "[]", '{"source": 1}'])
def test_a_record_of_something_else_is_no_reason_to_load_it(folder: Path, text: str) -> None:
    kernels.LIBRARY.write_bytes(b"anything")
    kernels.RECORD.write_text(text)
    assert kernels.missing()


def test_they_can_be_switched_off(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "off")
    assert kernels.SWITCH in kernels.missing()
    assert kernels.step("sgd") is None


@pytest.fixture
def build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hatch_build.py, for that place."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("SOURCE", "LIBRARY", "RECORD"):
        monkeypatch.setattr(module, name, getattr(kernels, name))
    monkeypatch.setattr(module, "KERNELS", folder)
    return module


@pytest.mark.parametrize("compiler", ["false", "true", "/nowhere/cc"])
def test_a_compiler_that_fails_leaves_none_and_says_so(
    compiler: str, build: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", compiler)
    kernels.LIBRARY.write_bytes(b"of an earlier build")
    assert build.compiled() is False
    assert "numpy" in capsys.readouterr().err
    assert kernels.missing()
    assert {path.name for path in kernels.SOURCE.parent.iterdir()} == {"kernels.c"}


@pytest.mark.skipif(bool(kernels.missing()), reason=f"no kernels here: {kernels.missing()}")
def test_what_is_built_can_be_loaded(build: Any) -> None:
    assert build.compiled() is True
    assert kernels._fault() == ""


@pytest.mark.skipif(bool(kernels.missing()), reason=f"no kernels here: {kernels.missing()}")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="no x86-64")
def test_a_build_for_a_newer_processor_is_one_for_all(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end a server on an older one with SIGILL."""
    built = []
    for more in "", " -march=x86-64-v4":
        monkeypatch.setenv("CC", f"cc{more}")
        assert build.compiled() is True
        built.append(kernels.digest(kernels.LIBRARY))
    assert built[0] == built[1]


ANOTHER = importlib.util.find_spec("numpy.linalg._umath_linalg")
NO_LIBRARY = b"\x7fELF" + bytes(range(256)) * 100
LOOK = """
from dlctl import kernels
print(kernels.FOLDER, kernels.missing(), kernels.step("sgd"), sep="\\n")
"""


@pytest.mark.skipif(bool(kernels.missing()), reason=f"no kernels here: {kernels.missing()}")
@pytest.mark.parametrize("content", [b"", NO_LIBRARY, None])
def test_a_foreign_file_that_the_record_fits_is_no_error(
    tmp_path: Path, content: bytes | None
) -> None:
    """In a process of its own, as Python loads a library once. None: a library of numpy."""
    if content is None:
        assert ANOTHER is not None
        assert ANOTHER.origin is not None
        content = Path(ANOTHER.origin).read_bytes()
    folder = tmp_path / "dlctl" / "kernels"
    shutil.copytree(ROOT / "dlctl", folder.parent, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / kernels.LIBRARY.name).write_bytes(content)
    found = {"source": kernels.SOURCE, "library": folder / kernels.LIBRARY.name}
    digests = {key: kernels.digest(path) for key, path in found.items()}
    (folder / kernels.RECORD.name).write_text(json.dumps(digests))
    ended = subprocess.run(
        [sys.executable, "-P", "-c", LOOK], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True, capture_output=True, check=True,
    )  # fmt: skip
    place, why, step = ended.stdout.splitlines()
    assert (place, step) == (str(folder), "None")
    assert why.startswith("it cannot be loaded: ")
