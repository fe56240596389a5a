"""One norm for all shards of an update: what the coordinator adds up, and who waits for it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_quorum import Office

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.methods.sync import Options
from dlctl.compress.base import Delta
from dlctl.errors import RemoteProtocolError
from dlctl.optim.sgd import SGD, SGDOptions
from dlctl.records.memory import Memory
from dlctl.roles.coordinator.training.norms import Norms
from dlctl.shards.memory import in_memory
from dlctl.wire import messages as m
from dlctl.wire.machine import Send
from dlctl.wire.messages import APPLIED, HELD


class Adding(Office):
    """The part of a coordinator that adds up; two servers."""

    def __init__(self) -> None:
        super().__init__(method="sync")
        self.norms = Norms(self.run)

    def says_part(self, shard: int, clock: int, squared: float, *, before: int = 0) -> None:
        """before: so many terms ago."""
        server = self.members.daemons[f"server-{shard}"]
        part = m.NormPart(shard, server.term - before, clock, squared)
        assert server.peer is not None
        self.norms.on_part(server.peer, part, 0.0)

    def answers(self) -> dict[str, tuple[int, float]]:
        self.norms.advance()
        found = [effect for effect in self.context.clear() if isinstance(effect, Send)]
        return {str(e.peer): (e.message.clock, e.message.squared) for e in found}  # type: ignore[attr-defined]


def test_all_hear_the_sum_when_all_have_said_their_part() -> None:
    office = Adding()
    office.says_part(0, 3, 2.0)
    assert office.answers() == {}
    office.says_part(1, 3, 0.5)
    assert office.answers() == {"server-0": (3, 2.5), "server-1": (3, 2.5)}
    assert office.answers() == {}, "nobody asks any more"


def test_what_was_said_stands_for_who_asks_again_also_after_a_coordinator_s_death() -> None:
    office = Adding()
    office.says_part(0, 3, 2.0)
    office.says_part(1, 3, 0.5)
    office.answers()
    newest = office.norms.newest
    assert newest is not None
    office.norms = Norms(office.run)
    office.norms.recall(Memory({"norm": newest.to_json()}), 0.0)
    office.comes("server-1")
    office.says_part(1, 3, 0.1)
    assert office.answers() == {"server-1": (3, 2.5)}


def test_a_shard_that_is_further_adds_nothing() -> None:
    office = Adding()
    office.says_part(0, 3, 2.0)
    office.says_part(1, 4, 1.0)
    assert office.answers() == {"server-0": (3, 2.0)}
    office.says_part(0, 4, 3.0)
    assert office.answers() == {"server-0": (4, 4.0), "server-1": (4, 4.0)}
    office.says_part(0, 5, 9.0)
    office.members.daemons["server-1"].metrics["version"] = 6
    assert office.answers() == {"server-0": (5, 9.0)}


def test_processes_of_before_and_what_is_no_square_are_not_believed() -> None:
    office = Adding()
    office.comes("server-0")
    office.says_part(0, 3, 2.0, before=1)
    office.says_part(1, 3, 2.0)
    assert office.answers() == {}
    for squared in (-1.0, math.nan, math.inf):
        with pytest.raises(RemoteProtocolError):
            office.says_part(0, 3, squared)


# ---------------------------------------------------------------- a barrier


def barrier() -> Barrier:
    shard = in_memory(SGD(SGDOptions(lr=1.0)), np.zeros(2, np.float32))
    shard.clip_norm = 1.0
    made = Barrier(Options(), shard)
    made.shared_norm.is_needed = True
    made.members(frozenset({0, 1}))
    return made


def pushed(side: Barrier, slot: int, *values: float, term: int = 1) -> list[str]:
    array = np.array(values, np.float32)
    push = m.Push(slot, term, 1, 0, 0, 0, 0, 8, 0, m.Packed("none", 2, (array,)), 0)
    return [outcome.kind for outcome in side.push(push, Delta(array))]


def test_a_step_waits_for_the_norm_of_all_shards_and_is_clipped_by_it() -> None:
    side = barrier()
    assert side.shared_norm.part() is None
    pushed(side, 0, 6.0, 0.0)
    assert pushed(side, 1, 0.0, 8.0) == [HELD]
    assert side.shared_norm.part() == (0, 25.0)
    assert side.shared_norm.hear(1, 4.0) == [], "that is of another step"
    assert [outcome.kind for outcome in side.shared_norm.hear(0, 100.0)] == [APPLIED, APPLIED]
    assert side.shard.w == pytest.approx([-0.3, -0.4])
    assert side.shared_norm.part() is None
    assert side.shared_norm.hear(0, 100.0) == []


def test_a_step_that_has_lost_a_push_is_clipped_by_the_norm_that_was_said_all_the_same() -> None:
    side = barrier()
    pushed(side, 0, 6.0, 0.0)
    pushed(side, 1, 0.0, 8.0)
    side.members(frozenset({0}))
    side.joined(1)
    assert side.shared_norm.part() == (0, 36.0), "the mean is another one now"
    assert [outcome.slot for outcome in side.shared_norm.hear(0, 100.0)] == [0]
    assert side.shard.w == pytest.approx([-0.6, 0.0])


def test_who_has_nothing_to_apply_says_so() -> None:
    side = barrier()
    for slot in (0, 1):
        push = m.Push(slot, 1, 1, 0, 0, 0, 0, 0, 0, m.Packed("none", 2, (np.zeros(2, "f4"),)), 0)
        side.left_out(push, "it is no good")
    assert side.shared_norm.part() == (0, 0.0)
    side.shared_norm.hear(0, 7.0)
    assert (side.clock(), side.shard.w.tolist()) == (1, [0.0, 0.0])
