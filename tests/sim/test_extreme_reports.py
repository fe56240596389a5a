"""Numbers as extreme as the wire lets through, in every message that a coordinator takes from a
worker or a server, for every method: after each of them a successor reads what it has persisted.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from simulated import job_file
from stolen_key import FIXED, extremes, numbers_of
from trajectories import SHORT

from dlctl import registry
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.network import Connection
from dlctl.sim.objectives import WithBuffers
from dlctl.sim.process import Process
from dlctl.sim.simulation import Simulation
from dlctl.sim.world import RUN_ID, World
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Send, Started

LIARS = ("worker-1", "server-1")
ENDS_IT = (m.Failed, m.SampleFailed, m.ModelReady)
"""A lie in these takes its worker out, or is refused: `liars` has them."""


class Honest(Checker):
    """The newest message of each type from the liars to the coordinator."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, type], m.Message] = {}

    def on_effect(self, process: Process, effect: Effect) -> None:
        if isinstance(effect, Send) and effect.peer == COORDINATOR and process.name in LIARS:
            self.sent[process.name, type(effect.message)] = effect.message


def connection_of(world: World, name: str) -> Connection:
    connections = world.network._outgoing.values()
    return next(c for c in connections if c.client is world.process(name) and c.peer == COORDINATOR)


def in_hand(world: World, message: m.Message) -> m.Message:
    """A portion that its worker has now can be done; all others are done or somebody else's."""
    if not isinstance(message, m.PortionDone):
        return message
    leased = world.machine(COORDINATOR).data.pool.holders.leased
    mine = [key for key, slot in leased.items() if slot == message.slot]
    return replace(message, data_epoch=mine[0][0], portion=mine[0][1]) if mine else message


def recorded(machine: Any) -> tuple[Any, ...]:
    data, progress = machine.data, machine.progress
    done = data.is_open and data.pool.to_json()
    return progress.steps, progress.samples, data.dataset, done


NAMES = registry.names("algorithms")


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_coordinator_s_successor_reads_its_records_after_any_message(name):
    method = registry.load("algorithms", name)
    choice, honest = method.optimizer, Honest()
    keys = {field.name for field in fields(method.Options)}
    options = {key: value for key, value in SHORT.items() if key in keys}
    job = job_file(
        3, 2 if method.shape.needs_servers else 0, algorithm=(name, options), batch_size=4,
        portion_batches=2, optimizer=(choice.name, dict(choice.options)), epochs=40.0,
    )  # fmt: skip
    compute = ComputeOptions(step_s=0.05, spread=0.0)
    simulation = Simulation(job, WithBuffers(samples=64), compute=compute, checkers=(honest,))
    assert simulation.run(1.5).state == ""
    world = simulation.world
    kinds = set()
    for (who, kind), message in sorted(
        honest.sent.items(), key=lambda row: (row[0][0], str(row[0][1]))
    ):
        found = {n: of for n, of in numbers_of(kind).items() if n not in FIXED}
        if kind in ENDS_IT or not world.process(who).alive:
            continue
        kinds.add(kind)
        for field, (limits, is_tuple) in found.items():
            for value in extremes(limits, 0 if is_tuple else getattr(message, field)):
                honestly = in_hand(world, message)
                lie = replace(honestly, **{field: (value,) * 3 if is_tuple else value})
                frames = [bytes(frame) for frame in codec.encode(lie)]
                of = connection_of(world, who)
                world.process(COORDINATOR).deliver(of.id, codec.decode(frames), who)
                assert world.coordinator.alive, lie
                successor = Coordinator(RUN_ID, job, world.keys, method, world.past())
                successor.handle(Started(), 0.0)
                assert recorded(successor) == recorded(world.machine(COORDINATOR)), lie
    assert {m.LeaseRequest, m.Report} <= kinds
