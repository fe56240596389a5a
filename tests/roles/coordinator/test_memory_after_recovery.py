"""What a recovery corrects in the memory of the coordinator before."""

from __future__ import annotations

from dlctl.roles.coordinator.persistence import corrected

MEMORY = {
    "run": ["running", "", 3.0],
    "daemon/agent-1": {"role": "agent", "registered": True},
    "daemon/server-0": {"role": "server", "has_served": False},
    "daemon/worker-0": {"role": "worker", "state": "quarantined"},
    "daemon/worker-1": {"role": "worker", "state": "running"},
}


def test_only_what_is_known_better_changes():
    assert corrected(MEMORY, {}) == {}
    assert corrected(MEMORY, {"served": ["server-0", "server-9"], "gone": ["agent-1"]}) == {
        "daemon/agent-1": {"role": "agent", "registered": False},
        "daemon/server-0": {"role": "server", "has_served": True},
    }


def test_a_shard_of_the_cut_before_has_not_served_the_newest_one():
    """All have died behind the record of the cut: server-0 still had its old part, server-1 not."""
    rows = {
        f"daemon/server-{index}": {
            "role": "server", "index": index, "term": term, "has_served": False,
        }
        for index, term in enumerate((3, 5))
    }  # fmt: skip
    memory = {**rows, "cut": [7, 20, "checkpoints/9", [3, 4]]}
    changed = corrected(memory, {"served": ["server-0", "server-1"]})
    assert changed == {"daemon/server-1": {**rows["daemon/server-1"], "has_served": True}}


def test_workers_in_quarantine_come_back_if_the_run_has_failed():
    """Its cause may be fixed, and it was theirs if they had the same error."""
    changed = corrected({**MEMORY, "run": ["failed", "a KeyError", 3.0]}, {})
    assert {key: row["state"] for key, row in changed.items()} == {"daemon/worker-0": "stopped"}


def test_workers_in_quarantine_of_a_run_at_work_come_back_only_if_there_are_no_others():
    alone = {**MEMORY, "daemon/worker-1": {"role": "worker", "state": "quarantined"}}
    changed = corrected(alone, {})
    assert {key: row["state"] for key, row in changed.items()} == {
        "daemon/worker-0": "stopped", "daemon/worker-1": "stopped",
    }  # fmt: skip
