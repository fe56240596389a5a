"""Whose doing it is when workers end: that of the machine, or of what they run."""

from __future__ import annotations

import pytest

from dlctl.roles.coordinator.members.crash_loops import NO_ROOM, UNSAID, blame, ends_by_itself
from dlctl.roles.coordinator.members.membership import Daemon, Membership
from dlctl.roles.protocol.context import EXIT_FENCED, EXIT_POISONED, EXIT_RESTART
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import ALIKE_LIFE_S, BLAMED, ordinal
from dlctl.wire.messages import ProcessExited

LIVED_S = 20.0
"""At work for twice as long as a death at the start would be."""


def worker(role: str = "worker") -> Daemon:
    return Membership([HOME_AGENT], {f"{role}-0": HOME_AGENT}, before={}).daemons[f"{role}-0"]


def die(
    daemon: Daemon, status: int, lived_s: float = LIVED_S, cause: str = "", error: str = ""
) -> float:
    """One life and its end; returns the pause before the next one."""
    daemon.begin(1000.0)
    daemon.restore_state("running")
    daemon.ended(ProcessExited(daemon.name, 1, status, (), cause), 1000.0 + lived_s, error)
    daemon.back_off(1000.0 + lived_s)
    assert daemon.retry_at is not None
    return daemon.retry_at - 1000.0 - lived_s


@pytest.mark.parametrize("status", [3, 1, 70, -11, -6])
def test_who_ends_by_itself_in_the_same_way_waits_longer_although_it_lived(status: int) -> None:
    daemon = worker()
    assert [die(daemon, status) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert daemon.deaths_in_row == 9
    assert daemon.last_exit is not None
    assert daemon.last_exit["in_row"] == 9


@pytest.mark.parametrize(
    "status", [-9, -15, 0, EXIT_FENCED, EXIT_RESTART, EXIT_POISONED, 77, 5, 9, STATUS_UNKNOWN]
)
def test_who_is_killed_from_outside_or_replaced_is_started_at_once_as_before(status: int) -> None:
    daemon = worker()
    assert [die(daemon, status, cause="out of memory") for _ in range(4)] == [0, 0, 0, 0]
    assert daemon.deaths_in_row == 1


def test_an_end_in_order_that_no_log_tells_of_was_the_tasks() -> None:
    daemon = worker()
    assert [die(daemon, 0, cause=UNSAID) for _ in range(3)] == [0, 0.5, 1]
    assert not ends_by_itself(0, "")


def test_a_process_that_a_full_disk_keeps_from_starting_is_no_fault_of_the_task() -> None:
    daemon = worker()
    assert [die(daemon, 1, 0.0, cause=NO_ROOM) for _ in range(4)] == [0, 0.5, 1, 2]
    assert daemon.last_exit is not None
    assert daemon.last_exit["text"].startswith("not started")
    assert "cause" not in daemon.last_exit


def test_another_end_or_a_really_long_life_begins_a_new_row() -> None:
    daemon = worker()
    for status, lived_s, expected in (
        (3, LIVED_S, 1), (3, LIVED_S, 2), (4, LIVED_S, 1), (4, ALIKE_LIFE_S, 2),
        (4, ALIKE_LIFE_S + 1.0, 1), (4, LIVED_S, 2), (-9, LIVED_S, 1), (4, LIVED_S, 1),
    ):  # fmt: skip
        die(daemon, status, lived_s)
        assert daemon.deaths_in_row == expected, (status, lived_s)


def test_servers_run_nothing_of_the_users() -> None:
    daemon = worker("server")
    assert [die(daemon, 1) for _ in range(3)] == [0, 0, 0]


def test_what_was_before_a_restart_on_request_does_not_count() -> None:
    daemon = worker()
    for _ in range(3):
        die(daemon, 3)
    daemon.forgive()
    die(daemon, 3)
    assert daemon.deaths_in_row == 1


@pytest.mark.parametrize(
    ("status", "times", "error", "words"),
    [
        (3, 1, "", f": {BLAMED} (os._exit, or a library)"),
        (3, 4, "", f", for the 4th time in a row: {BLAMED} (os._exit, or a library)"),
        (1, 2, "No such file", ", for the 2nd time in a row"),
        (-11, 2, "", ", for the 2nd time in a row"),  # Nobody knows whose fault it is.
        (-9, 1, "", ""),
    ],
)
def test_an_end_is_blamed_on_the_task_only_if_nobody_has_said_another_reason(
    status: int, times: int, error: str, words: str
) -> None:
    daemon = worker()
    for _ in range(times):
        die(daemon, status, error=error)
    assert daemon.last_exit is not None
    assert blame(daemon.last_exit) == words


def test_numbers_in_a_row_are_told_in_words() -> None:
    ordinals = [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 22, 103, 111, 1001)]
    assert ordinals == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "103rd", "111th",
        "1,001st",
    ]  # fmt: skip
