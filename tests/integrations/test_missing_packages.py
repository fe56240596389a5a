"""Without its package an integration says what to install, and does nothing else."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_an_integration_names_the_package_that_it_needs(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"dlctl.integrations.{package}"
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Without(package), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(module)
    assert raised.value.name == package
    assert f"pip install 'dlctl[{package}]'" in str(raised.value)
    assert module not in sys.modules


class _Without:
    """Finds no package of this name, installed or not."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {self._package!r}", name=self._package)
