"""The table of a daemon's life, and the run's: nothing else changes a state."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dlctl.roles.coordinator import run_state
from dlctl.roles.coordinator.members import daemon_states
from dlctl.roles.coordinator.members.daemon_states import SOURCES, STATES
from dlctl.roles.coordinator.members.membership import LASTING, Daemon

PACKAGE = Path(daemon_states.__file__).parent.parent
MODULES = {path.stem: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


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
        state: frozenset(after for after, sources in SOURCES.items() if state in sources)
        for state in STATES
    }
    assert reachable(daemon_states.PENDING, following) == STATES
    assert all(following[state] - {state} for state in STATES)
    assert SOURCES.keys() == STATES - {daemon_states.PENDING}


def test_every_state_of_the_run_can_be_reached() -> None:
    ends = {"finished", "stopped", "failed"}
    assert reachable("pending", run_state.NEXT) == run_state.NEXT.keys() | ends
    assert not ends & run_state.NEXT.keys()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (daemon_states.PENDING, daemon_states.RUNNING),
        (daemon_states.STOPPED, daemon_states.RUNNING),
        (daemon_states.QUARANTINED, daemon_states.BACKOFF),
        (daemon_states.FAILED, daemon_states.STOPPED),
        (daemon_states.STARTING, daemon_states.SLOW),
        (daemon_states.RUNNING, daemon_states.QUARANTINED),
    ],
)
def test_what_cannot_follow_is_a_bug_and_not_a_state(before: str, after: str) -> None:
    daemon = Daemon("worker-0", "worker", 0)
    daemon.restore_state(before)
    with pytest.raises(AssertionError, match=f"{before} -> {after}"):
        daemon.change_state(after)


def test_only_the_table_changes_the_state_of_a_daemon() -> None:
    daemon = Daemon("worker-0", "worker", 0)
    with pytest.raises(AttributeError):
        daemon.state = "running"  # type: ignore[misc]
    assert "_state" not in LASTING
    found = {
        (module, target)
        for module, source in MODULES.items()
        for target in assigned(source)
        if target.rpartition(".")[2] in ("state", "_state")
    }
    assert found == {
        ("membership", "self._state"),
        ("run_state", "self.state"),
        ("shutdown", "self.state"),  # How the run ends.
        ("coordinator", "self.run.shutdown.state"),
    }
    assert MODULES["membership"].count("self._state = ") == 2


@pytest.mark.parametrize("state", SOURCES)
def test_every_state_is_entered_somewhere(state: str) -> None:
    entered = f"change_state(daemon_states.{state.upper()}"
    other = f"else daemon_states.{state.upper()})"
    assert [m for m, source in MODULES.items() if entered in source or other in source]
