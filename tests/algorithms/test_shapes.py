"""What a method may declare of itself, and what is said of one that does not fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from dlctl.algorithms.base import MODEL, Lead, Method, Needs, ReplicaSide, Shape, Table
from dlctl.algorithms.downpour import DOWNPOUR
from dlctl.algorithms.needs import Ask, Collective, Engine, Read, Write, mean
from dlctl.algorithms.quorum import Chosen
from dlctl.algorithms.shapes import faults_of
from dlctl.errors import DlctlError
from dlctl.sim.objectives import layout_of


class Deciding(Lead):
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
        "its shard side asks the lead which pushes count, and the lead has no quorum"
    ]
    assert faults_of(replace(DOWNPOUR, shard=Chosen, lead=Deciding)) == []


class Reads(ReplicaSide):
    def run(self) -> Needs:
        yield Read(wait=True)


class Writes(ReplicaSide):
    def run(self) -> Needs:
        yield Write(vector=None)


class TakesMeans(ReplicaSide):
    def run(self) -> Needs:
        while True:
            yield from mean("m", 0, self.parameters, 1)


class Asks(ReplicaSide):
    def run(self) -> Needs:
        while True:
            yield from (Ask(slot=slot, op="x") for slot in self.members)


class Sums(ReplicaSide):
    def run(self) -> Needs:
        yield Collective(vector=self.parameters)


class RunsAnEngine(ReplicaSide):
    def run(self) -> Needs:
        yield Engine(op="x")


@pytest.mark.parametrize(
    ("replica", "what"),
    [
        (Reads, "reads or writes, and declares no tables"),
        (Writes, "reads or writes, and declares no tables"),
        (TakesMeans, "reads or writes, and declares no tables"),
        (Asks, 'asks other replicas, and does not declare links "peers"'),
        (Sums, 'has collectives, and no links "group"'),
        (RunsAnEngine, "uses an engine, and declares none"),
    ],
)
def test_what_a_replica_needs_is_in_the_shape(replica: type[ReplicaSide], what: str) -> None:
    alone = Method(Options=dict, replica=replica, shape=Shape(tables=(), model="replica"))
    assert faults_of(alone) == [f"it {what}"]
    shape = replace(DOWNPOUR.shape, links=frozenset({"peers", "group"}), engine="x:Y", twin="x:Z")
    assert faults_of(replace(DOWNPOUR, replica=replica, shape=shape)) == []


@pytest.mark.parametrize("size", [0, -3])
def test_a_table_has_elements(size: int) -> None:
    shape = Shape(tables=(MODEL, Table(name="seen", rule="add", size=lambda layout: size)))
    with pytest.raises(DlctlError, match=f'"seen" has {size} elements with this model'):
        shape.check_sizes(layout_of(4))
    Shape().check_sizes(layout_of(4))
