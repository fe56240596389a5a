"""A package from outside that uses what an earlier version had is told what there is instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from dlctl import jobfile, outdated, registry
from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import Method, PushKind, Table
from dlctl.algorithms.methods.downpour import DOWNPOUR
from dlctl.algorithms.methods.sync import Replica
from dlctl.algorithms.needs import Ask
from dlctl.outdated import DECLARED, INSTEAD, MOVED, Outdated
from dlctl.shards.base import Shard
from dlctl.wire.messages import Packed, Push

METHOD = """
from dataclasses import dataclass
from dlctl.algorithms.base import Lead, Method
from dlctl.algorithms.stepwise import Replica
from dlctl.algorithms.barrier import Barrier

@dataclass(slots=True, kw_only=True)
class Options:
    pass
"""
FITS = METHOD + "\nMETHOD = Method(Options=Options, replica=Replica, shard=Barrier)\n"


class Outside:
    """A package of one module, installed beside dlctl."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, source: str, kind: str = "algorithms") -> None:
        (self.directory / "outside.py").write_text(source)
        about = self.directory / "outside-1.0.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[dlctl.{kind}]\noutside = outside:METHOD\n")
        registry._third_party.cache_clear()
        sys.modules.pop("outside", None)

    def refused(self, source: str, kind: str = "algorithms") -> str:
        self.write(source, kind)
        with pytest.raises(Outdated) as error:
            registry.load(kind, "outside")
        return str(error.value)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Outside(tmp_path)
    sys.modules.pop("outside", None)
    registry._third_party.cache_clear()


def has(path: str) -> bool:
    """Whether this is a class of this version."""
    module, _, name = path.rpartition(".")
    return name[:1].isupper() and isinstance(getattr(import_module(module), name, None), type)


PUSH = "dlctl.wire.messages.data.Push."
FIELDS = [name for name in INSTEAD if name.startswith(PUSH)]
ARGUMENTS = [name for name in INSTEAD if name.endswith("=)")]
_OTHERS = INSTEAD.keys() - {*FIELDS, *ARGUMENTS}
MEMBERS = [name for name in INSTEAD if name in _OTHERS and has(name.rpartition(".")[0])]
SAMPLES = ("dlctl.messages", "dlctl.algorithms.sync")
"""Of the modules that are elsewhere now."""
NAMES = [*SAMPLES, *sorted(INSTEAD.keys() - {*MEMBERS, *FIELDS, *ARGUMENTS, *MOVED})]


def test_what_fits_is_loaded(outside: Outside) -> None:
    outside.write(FITS)
    assert isinstance(registry.load("algorithms", "outside"), Method)


@pytest.mark.parametrize("path", NAMES)
@pytest.mark.parametrize("form", ["from {0} import {1}", "import {0}\n{0}.{1}"])
def test_a_name_that_has_moved(outside: Outside, path: str, form: str) -> None:
    module, _, name = path.rpartition(".")
    refusal = outside.refused(f"{form.format(module, name)}\n{FITS}")
    assert refusal.startswith('algorithm "outside" from outside 1.0: ')
    assert path in refusal
    assert INSTEAD[path] in refusal


def test_a_module_that_is_elsewhere_now_is_there() -> None:
    for module in MOVED.values():
        assert import_module(module).__name__ == module


def test_a_module_that_is_gone(outside: Outside) -> None:
    refusal = outside.refused(f"import dlctl.algorithms.sparse as sparse\n{FITS}")
    assert INSTEAD["dlctl.algorithms.sparse"] in refusal
    outside.write(f"import dlctl.algorithms.never_there\n{FITS}")
    with pytest.raises(ImportError, match="never_there"):
        registry.load("algorithms", "outside")


@pytest.mark.parametrize("path", MEMBERS)
def test_a_hook_that_is_not_called_any_more(outside: Outside, path: str) -> None:
    base, _, hook = path.rpartition(".")
    module, _, name = base.rpartition(".")
    side = "shard" if "Side" in name and "Replica" not in name else "replica"
    refusal = outside.refused(
        f"{METHOD}\nfrom {module} import {name} as Base\n"
        f"class Mine(Base):\n    def run(self): ...\n    def {hook}(self, *given): ...\n"
        f'sides = {{"replica": Replica, "shard": Barrier}} | {{"{side}": Mine}}\n'
        "METHOD = Method(Options=Options, **sides)\n"
    )
    assert f"outside.Mine.{hook}: {path}" in refusal
    assert INSTEAD[path] in refusal


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_of_a_push_that_has_another_name(path: str) -> None:
    push = Push(0, 3, 4, 0, 0, 0, 0, 1, 0, Packed("none", 0, ()))
    with pytest.raises(AttributeError) as error:
        getattr(push, path.removeprefix(PUSH))
    assert INSTEAD[path] in str(error.value)
    assert (push.term, push.shard_term) == (3, 4)


@pytest.mark.parametrize("path", DECLARED)
def test_a_hook_whose_class_does_not_declare_it(outside: Outside, path: str) -> None:
    hook, (key, value) = path.rpartition(".")[2], DECLARED[path]
    source = (
        f"{METHOD}\nclass Mine(Lead):\n    {key} = VALUE\n    def {hook}(self, *given): ...\n"
        "METHOD = Method(Options=Options, replica=Replica, shard=Barrier, lead=Mine)\n"
    )
    refusal = outside.refused(source.replace("VALUE", "Lead." + key))
    assert f"`{key} = {value!r}`" in refusal
    outside.write(source.replace("VALUE", repr(value)))
    assert registry.load("algorithms", "outside").lead.__name__ == "Mine"


def test_an_argument_that_is_not_taken_any_more(outside: Outside) -> None:
    refusal = outside.refused(FITS.replace("shard=Barrier", "shard=Barrier, live={}"))
    assert INSTEAD["Method(live=)"] in refusal
    outside.write(FITS.replace("shard=Barrier", "shard=Barrier, colour=1"))
    with pytest.raises(ImportError, match="colour"):
        registry.load("algorithms", "outside")
    with pytest.raises(TypeError) as error:
        Ask(slot=1, op="x", wait=False)  # type: ignore[call-arg]
    assert INSTEAD["Ask(wait=)"] in outdated.argument(error.value)
    with pytest.raises(TypeError) as error:
        Table(name="x", rule="add", rows=None)  # type: ignore[call-arg]
    assert INSTEAD["Table(rows=)"] in outdated.argument(error.value)

    class Old(Replica):
        @classmethod
        def one_push(cls, options: object) -> PushKind:
            return PushKind(1, is_way=True)  # type: ignore[call-arg]

    with pytest.raises(Outdated) as refused:
        replace(DOWNPOUR, replica=Old).push_kind(None)
    assert INSTEAD["PushKind(is_way=)"] in str(refused.value)
    with pytest.raises(TypeError) as error:
        Shard.apply(told={})  # type: ignore[call-arg]
    assert INSTEAD["Shard.apply(told=)"] in outdated.argument(error.value)
    classes = {"Method(live=)", "Ask(wait=)", "Table(rows=)", "PushKind(is_way=)"}
    assert classes | {"Shard.apply(told=)"} == {*ARGUMENTS}


def test_a_helper_that_a_side_once_had_says_so_when_it_is_used() -> None:
    for kind, name in ((Replica, "_join"), (Replica, "_next_step"), (Barrier, "_members")):
        side = object.__new__(kind)
        with pytest.raises(AttributeError) as error:
            getattr(side, name)
        assert any(INSTEAD[path] in str(error.value) for path in INSTEAD if path.endswith(name))
    with pytest.raises(AttributeError, match="'colour'"):
        object.__new__(Barrier).colour  # type: ignore[attr-defined]  # noqa: B018


def test_a_compressor_that_is_derived_from_nothing(outside: Outside) -> None:
    refusal = outside.refused("class METHOD:\n    Options = None\n", "compressors")
    assert "dlctl.compress.base.Compressor" in refusal


def test_a_job_file_that_names_it_is_refused_with_that(outside: Outside, tmp_path: Path) -> None:
    outside.write(f"from dlctl.algorithms.needs import LEFT_OUT_MAX\n{FITS}")
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.toml"
    path.write_text(
        'job = { name = "a", task = "train.py:task" }\nalgorithm.name = "outside"\n'
        "workers.count = 2\n"
    )
    with pytest.raises(jobfile.JobFileError) as error:
        jobfile.load(path)
    (problem,) = error.value.problems
    assert INSTEAD["dlctl.algorithms.needs.LEFT_OUT_MAX"] in problem.message
    outside.write(FITS)
    assert jobfile.load(path).algorithm.name == "outside"


def test_nothing_of_this_version_is_in_the_table() -> None:
    """So a name that comes back cannot be refused."""
    for path in MEMBERS:
        base, _, name = path.rpartition(".")
        module, _, kind = base.rpartition(".")
        assert name not in dir(getattr(import_module(module), kind)), path
    for path in NAMES:
        module, _, name = path.rpartition(".")
        assert name not in vars(import_module(module)), path
    for path in DECLARED:
        assert hasattr(DOWNPOUR.lead, path.rpartition(".")[2]), path
