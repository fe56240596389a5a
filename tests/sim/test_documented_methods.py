"""The methods in the documents that a reader copies: they train, whoever dies."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from try_method import DEATHS, tried

from dlctl import registry
from dlctl.algorithms.base import PushOutcome, ShardSide
from dlctl.algorithms.methods.softsync import SOFTSYNC
from dlctl.algorithms.shapes import faults_of
from dlctl.compress.base import Delta
from dlctl.wire import messages
from dlctl.wire.messages import HELD

PAGE = Path(__file__).parents[2] / "docs/internals.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_a_method_of_the_documents_trains_whoever_dies(number, monkeypatch):
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    exec(compile(EXAMPLES[number], str(PAGE), "exec"), module.__dict__)
    entry = registry.Component("documented:MINE", "an example")
    monkeypatch.setitem(registry.BUILT_IN["algorithms"], "mine", entry)
    assert faults_of(module.MINE) == []
    is_local = module.MINE.inner.name != "none"
    options = {"local_steps": 4, "inner_lr": 0.03} if is_local else {}
    for faults in (None, DEATHS):
        assert tried("mine", options, 0, faults, 1.0 if is_local else 0.03, 16) == ""


class Holding(ShardSide):
    """Waits for a fourth push; the three replicas wait for theirs before they push again."""

    def push(self, push: messages.Push, delta: Delta) -> list[PushOutcome]:
        return [push.outcome(HELD)]


def test_of_a_method_that_stands_still_one_is_told_who_waits_for_whom(monkeypatch):
    module = ModuleType("standing")
    module.MINE = replace(SOFTSYNC, shard=Holding)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "standing", module)
    entry = registry.Component("standing:MINE", "an example")
    monkeypatch.setitem(registry.BUILT_IN["algorithms"], "mine", entry)
    assert "worker-0: fetching, waits for server-0, server-1" in tried("mine", {}, 0, None, 0.03)


def test_there_are_two():
    assert len(EXAMPLES) == 2
