"""A library that is not exactly what was built from this source is never loaded."""

import importlib.util
import json
import shutil
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
