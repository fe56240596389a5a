"""The table of a daemon's life, and the run's: nothing else changes a state."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dlctl.roles.coordinator import daemon_states, run_state
from dlctl.roles.coordinator.daemon_states import STATES, TRANSITIONS, ImpossibleTransition, after
from dlctl.roles.coordinator.membership import LASTING, Daemon

PACKAGE = Path(daemon_states.__file__).parent
SOURCES = {path.stem: path.read_text() for path in sorted(PACKAGE.glob("*.py"))}


def reachable(first: str, following: Mapping[str, frozenset[str]]) -> set[str]:
    found, waiting = set(), [first]
    while waiting:
        state = waiting.pop()
        if state not in found:
            found.add(state)
            waiting += following.get(state, ())
    return found


def assigned(source: str) -> Iterator[str]:
    """The attributes that are assigned, as they are written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node)


def test_every_state_can_be_reached_and_left() -> None:
    following = {
        state: frozenset(t.target for t in TRANSITIONS.values() if state in t.sources)
        for state in STATES
    }
    assert reachable(daemon_states.PENDING, following) == STATES
    assert all(following[state] - {state} for state in STATES)
    assert {t.target for t in TRANSITIONS.values()} == STATES - {daemon_states.PENDING}
    assert all(t.sources <= STATES for t in TRANSITIONS.values())


def test_every_state_of_the_run_can_be_reached() -> None:
    ends = {"finished", "stopped", "failed"}
    assert reachable("pending", run_state.NEXT) == run_state.NEXT.keys() | ends
    assert not ends & run_state.NEXT.keys()


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (daemon_states.PENDING, daemon_states.WORK),
        (daemon_states.STOPPED, daemon_states.WORK),
        (daemon_states.QUARANTINED, daemon_states.BACK_OFF),
        (daemon_states.QUARANTINED, daemon_states.RENEW),
        (daemon_states.RUNNING, daemon_states.BACK_OFF),
        (daemon_states.FAILED, daemon_states.DIE),
        (daemon_states.STARTING, daemon_states.FALL_SILENT),
    ],
)
def test_what_cannot_follow_is_a_bug_and_not_a_state(state: str, event: str) -> None:
    with pytest.raises(ImpossibleTransition, match=f'"{event}" cannot follow on the state'):
        after(state, event)


def test_only_the_table_changes_the_state_of_a_daemon() -> None:
    daemon = Daemon("worker-0", "worker", 0)
    with pytest.raises(AttributeError):
        daemon.state = "running"  # type: ignore[misc]
    assert "_state" not in LASTING
    found = {
        (module, target)
        for module, source in SOURCES.items()
        for target in assigned(source)
        if target.rpartition(".")[2] in ("state", "_state")
    }
    assert found == {
        ("membership", "self._state"),
        ("run_state", "self.state"),
        ("shutdown", "self.state"),  # How the run ends.
        ("coordinator", "self.run.shutdown.state"),
    }
    assert SOURCES["membership"].count("self._state = ") == 2


@pytest.mark.parametrize("event", TRANSITIONS)
def test_every_event_happens_somewhere(event: str) -> None:
    (name,) = (key for key, value in vars(daemon_states).items() if value == event)
    users = [m for m, source in SOURCES.items() if f"daemon_states.{name}" in source]
    assert users
