"""What a method may declare of itself, and what is said of one that does not fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from builders import site

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.base import MODEL, Drives, Lead, Method, Shape, Table
from dlctl.algorithms.means import SparseMean
from dlctl.algorithms.methods.downpour import DOWNPOUR, Server
from dlctl.algorithms.needs import (
    Ask,
    Collective,
    Done,
    Engine,
    Gradient,
    Need,
    NextData,
    NextRows,
    OwnState,
    OwnStep,
    Read,
    Settle,
    Write,
)
from dlctl.algorithms.quorum import Chosen
from dlctl.algorithms.shapes import UNDECLARED, check_names, faults_of, served
from dlctl.algorithms.tables import side_of
from dlctl.errors import DlctlError
from dlctl.job.config import Choice
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.shards.base import Shard
from dlctl.shards.memory import in_memory
from dlctl.sim.objectives import layout_of

ZEROS = np.zeros(4, np.float32)


class Deciding(Lead):
    chooses = True

    def quorum(
        self, clock: int, came: Mapping[int, int], members: frozenset[int], waited_s: float
    ) -> frozenset[int] | None:
        return frozenset(came)


def faults(*tables: Table) -> list[str]:
    return faults_of(replace(DOWNPOUR, shape=Shape(tables=tables)))


@pytest.mark.parametrize("name", ["seen", "s", "layer_12", "a" * 32])
def test_a_table_may_be_called_like_a_file(name: str) -> None:
    assert faults(MODEL, Table(name=name, rule="add")) == []


@pytest.mark.parametrize(
    "name", ["", "Seen", "a.b", "a-b", "../w", "a b", "1st", "_a", "a" * 33, "seen\n"]
)
def test_a_table_is_called_nothing_else(name: str) -> None:
    (fault,) = faults(MODEL, Table(name=name, rule="add"))
    assert fault.startswith("these names of tables are no names of files")


def test_the_parameters_come_first_and_alone_follow_the_optimiser() -> None:
    seen = Table(name="seen", rule="add")
    assert faults(seen, MODEL) == [
        'its first table is "seen", and has to be "w"',
        "only the parameters can follow the servers' optimiser",
    ]
    assert faults(MODEL, Table(name="more", rule="optimizer")) == [
        "only the parameters can follow the servers' optimiser"
    ]
    assert faults(MODEL, seen, seen) == ["it has two tables of one name: w, seen, seen"]


def test_a_shard_side_that_asks_needs_a_lead_that_answers() -> None:
    assert faults_of(replace(DOWNPOUR, shard=Chosen)) == [
        "its shard side asks the lead which pushes count, and the lead does not choose"
    ]
    assert faults_of(replace(DOWNPOUR, shard=Chosen, lead=Deciding)) == []


def test_who_averages_no_pushes_declares_no_mean() -> None:
    (fault,) = faults_of(replace(DOWNPOUR, mean=SparseMean))
    assert fault.startswith("it says how pushes are averaged")
    assert faults_of(replace(DOWNPOUR, mean=SparseMean, shard=Barrier)) == []


ALONE = Method(Options=dict, replica=DOWNPOUR.replica, shape=Shape(tables=(), model="replica"))


@pytest.mark.parametrize(
    ("declared", "needs"),
    [
        (replace(ALONE, shape=Shape()), {Read, Write, Settle}),
        (replace(ALONE, shape=replace(ALONE.shape, links=frozenset({"peers"}))), {Ask}),
        (replace(ALONE, shape=replace(ALONE.shape, links=frozenset({"group"}))), {Collective}),
        (replace(ALONE, shape=replace(ALONE.shape, engine="x:Y", twin="x:Z")), {Engine}),
        (replace(ALONE, inner=Choice(name="sgd")), {OwnStep, OwnState}),
    ],
)
def test_a_method_is_served_what_it_declares(declared: Method, needs: set[type[Need]]) -> None:
    assert served(ALONE) == {NextData, NextRows, Gradient, Done}
    assert served(declared) == served(ALONE) | needs
    assert needs <= UNDECLARED.keys()


class Driving(Lead):
    portions = "batch"

    def drive(self) -> Drives:
        yield from ()
        return "done"


def test_what_the_coordinator_drives_has_tables_of_the_lead_and_nothing_else_has() -> None:
    fault = 'it needs tables of rule "lead" if the coordinator drives it, and none else'
    theirs = Shape(tables=(Table(name="w", rule="lead"),))
    driven = replace(DOWNPOUR, shape=theirs, shard=None, lead=Driving)
    assert faults_of(driven) == []
    assert faults_of(replace(driven, lead=Lead)) == [fault]
    assert faults_of(replace(DOWNPOUR, lead=Driving)) == [fault]


class Forgetful(Lead):
    portions = "batch"
    cuts_epochs = chooses = True


def test_a_lead_that_declares_what_it_does_not_do_says_so() -> None:
    lead = Forgetful(None)
    for what in (lead.drive, lead.cut_epoch, lambda: lead.quorum(0, {}, frozenset(), 0.0)):
        with pytest.raises(NotImplementedError, match="Forgetful"):
            what()


class Holding(Server):
    def __init__(self, options: object, shard: Shard) -> None:
        super().__init__(options, shard)
        self.held = []  # type: ignore[assignment,method-assign]


def test_an_attribute_that_hides_a_hook_is_refused_by_name() -> None:
    method, shard = replace(DOWNPOUR, shard=Holding), in_memory(SGD(SGDOptions(lr=1.0)), ZEROS)
    with pytest.raises(TypeError, match=r"`self\.held`.*`self\._held`"):
        side_of(MODEL, method, None, shard)
    side = site(None, ZEROS.copy())
    replica = DOWNPOUR.replica(side)
    check_names(replica)
    replica.leave = True  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError, match=r"`self\.leave`"):
        check_names(replica)


@pytest.mark.parametrize("size", [0, -3])
def test_a_table_has_elements(size: int) -> None:
    shape = Shape(tables=(MODEL, Table(name="seen", rule="add", size=lambda layout: size)))
    with pytest.raises(DlctlError, match=f'"seen".* {size} '):
        shape.check_sizes(layout_of(4))
    Shape().check_sizes(layout_of(4))
