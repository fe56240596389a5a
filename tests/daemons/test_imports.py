"""Large packages are imported without collections of garbage, and nothing else is different."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from daemons import imports

LARGE = "import gc\nwas_enabled = gc.isenabled()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The first in which modules are searched for; those of it are forgotten."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def test_only_what_is_large_is_imported_without_collections(folder: Path) -> None:
    for name in ("large_package", "small_package"):
        (folder / f"{name}.py").write_text(LARGE)
    imports.quicken(frozenset({"large_package"}))
    large = importlib.import_module("large_package")
    small = importlib.import_module("small_package")
    assert (large.was_enabled, small.was_enabled) == (False, True)
    assert gc.isenabled()
    assert large.__spec__ is not None
    assert isinstance(large.__spec__.loader, SourceFileLoader)
    assert large.__loader__ is large.__spec__.loader
    assert large.__file__ == str(folder / "large_package.py")


def test_an_import_that_fails_leaves_collections_as_they_were(folder: Path) -> None:
    (folder / "large_package.py").write_text("raise ValueError('broken')\n")
    imports.quicken(frozenset({"large_package", "package_that_is_not_there"}))
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("large_package")
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("package_that_is_not_there")
    gc.disable()
    try:
        with imports.without_collections():
            pass
        assert not gc.isenabled(), "the user has switched them off"
    finally:
        gc.enable()
