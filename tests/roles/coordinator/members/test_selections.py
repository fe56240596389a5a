"""What the coordinator knows of its daemons without looking at all of them."""

from __future__ import annotations

import random

import pytest

from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.coordinator.members.selections import ByContact, Due
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m

WORKERS = [f"worker-{slot}" for slot in range(6)]


@pytest.fixture
def members() -> Membership:
    return Membership((HOME_AGENT,), dict.fromkeys(["server-0", *WORKERS], HOME_AGENT), {})


def changes_at_random(members: Membership, draw: random.Random, now: float) -> None:
    """One of the changes that happen to daemons."""
    daemon = draw.choice(list(members.daemons.values()))
    what = draw.randrange(7)
    if what == 0:
        daemon.begin(now)
    elif what == 1 and daemon.alive:
        daemon.ended(
            m.ProcessExited(daemon.name, daemon.incarnation, draw.choice((0, -9)), ()), now
        )
    elif what == 2 and daemon.state in ("failed", "stopped"):
        daemon.back_off(now)
    elif what == 3 and daemon.alive:
        daemon.heard(b"connection", now)
        daemon.asked_for_data = True
    elif what == 4:
        daemon.drained = not daemon.drained
    elif what == 5 and daemon.role == "worker" and len(members.daemons) > 3:
        members.remove(daemon.name)
    elif what == 6 and len(members.daemons) < 12:
        members.add_worker()


def test_a_selection_has_exactly_those_that_meet_its_condition_in_their_order(members) -> None:
    def is_up(daemon: Daemon) -> bool:
        return daemon.alive and not daemon.drained

    draw, up, due = random.Random(2), members.select(("_state", "drained"), is_up), Due("retry_at")
    by_contact = ByContact()
    members.observe(due)
    members.observe(by_contact)
    for now in range(2000):
        changes_at_random(members, draw, float(now))
        daemons = list(members.daemons.values())
        assert list(up) == [daemon for daemon in daemons if is_up(daemon)]
        assert len(up) == len(list(up))
        assert up.first(2) == list(up)[:2]
        waiting = [daemon for daemon in daemons if daemon.retry_at is not None]
        assert due.first() == min((d.retry_at for d in waiting), default=None)
        assert due.by(float(now)) == [d for d in waiting if d.retry_at <= now]
        silent = {d.name for d in daemons if now - d.heard_at > 20.0}
        assert {daemon.name for daemon in by_contact.silent_for(20.0, float(now))} == silent
        newest = next(by_contact.newest())
        assert newest.heard_at == max(daemon.heard_at for daemon in daemons)
        workers = [daemon for daemon in daemons if daemon.role == "worker"]
        by_index = sorted(workers, key=lambda daemon: daemon.index)
        assert members.of_role("worker") == by_index
        assert members.live_slots() == tuple(
            d.index for d in by_index if d.alive and d.asked_for_data and not d.drained
        )


def test_the_slots_that_take_part_are_the_same_object_until_they_change(members) -> None:
    for name in WORKERS[:2]:
        members.daemons[name].begin(1.0)
        members.daemons[name].asked_for_data = True
    before = members.live_slots()
    members.daemons["worker-0"].change_state(daemon_states.RUNNING)
    assert members.live_slots() is before
    members.daemons["worker-0"].drained = True
    assert (before, members.live_slots()) == ((0, 1), (1,))


def test_only_what_has_changed_is_persisted_again_and_the_removed_are_forgotten(members) -> None:
    first = dict(members.changes())
    assert list(first) == ["daemon/agent-0", "daemon/server-0", *(f"daemon/{w}" for w in WORKERS)]
    assert dict(members.changes()) == {}
    worker = members.daemons["worker-3"]
    worker.begin(1.0)
    worker.heard(b"connection", 2.0)
    members.remove("worker-5")
    changed = dict(members.changes())
    assert set(changed) == {"daemon/worker-3", "daemon/worker-5"}
    assert (changed["daemon/worker-3"]["state"], changed["daemon/worker-5"]) == ("starting", None)
    worker.heard(b"connection", 3.0)
    assert dict(members.changes()) == {}, "when it was heard is not persisted"
    assert members.add_worker().name == "worker-5"
    assert dict(members.changes())["daemon/worker-5"]["state"] == "pending"


def test_the_daemons_of_an_agent_follow_a_worker_that_moves(members) -> None:
    two = Membership(("agent-0", "agent-1"), {"worker-0": "agent-0", "worker-1": "agent-1"}, {})
    here, there = two.daemons["agent-0"], two.daemons["agent-1"]
    assert [d.name for d in two.hosted_by(there)] == ["worker-1"]
    two.daemons["worker-1"].agent = "agent-0"
    assert [d.name for d in two.hosted_by(here)] == ["worker-0", "worker-1"]
    assert two.hosted_by(there) == []
