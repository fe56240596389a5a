"""What has to be on record first waits for room on the disk, for as long as it takes: nobody is
blamed for that, and what somebody else has said meanwhile is not taken for its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from simulated import ACCOUNT, Watcher, job_file

from dlctl.roles.coordinator.shutdown import EXIT_S, RECORD_S, SAVE_PAUSE_S, SAVES_MAX
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import AcksChecker, Book, LedgerChecker, NothingLeft, TermsChecker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import Ledger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire import messages as m

pytestmark = pytest.mark.long

FULL_S, DEATH_S = 2.0, 2.5
LONG_S, SHORT_S = 720.0, 60.0
"""Until when the disk is full: longer than anybody waits without a word, and not."""


def begun(
    full_until_s: float, *watchers: Watcher, how: str = "full", resend_s: float = 0.3,
    **options: object,
) -> Simulation:  # fmt: skip
    """how: "full", or "tight": there is room for small things, but not for a shard."""
    problem = Ledger(shards=2, cells=2000)
    job = job_file(
        2, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, restarts_max=8,
        timeouts={"resend_s": resend_s, "silent_s": 6.0, "ready_s": 5.0}, **options,
    )  # fmt: skip
    book = Book(problem)
    checkers = (book, LedgerChecker(book), AcksChecker(book), TermsChecker(), NothingLeft())
    simulation = Simulation(
        job, problem, compute=ComputeOptions(step_s=1.0), checkers=(*checkers, *watchers),
        faults=Faults(heal_at_s=full_until_s),
    )  # fmt: skip
    disk = simulation.world.disk
    simulation.at(FULL_S, lambda: setattr(disk, how, 1))
    return simulation


def kill(simulation: Simulation, when_s: float, name: str) -> None:
    simulation.at(when_s, lambda: simulation.world.kill(name))


def states(simulation: Simulation) -> dict[str, tuple[str, int]]:
    """Daemon -> (its state as the coordinator knows it, its incarnation)."""
    daemons = simulation.world.machine(COORDINATOR).members.daemons
    return {name: (daemon.state, daemon.incarnation) for name, daemon in daemons.items()}


def finish(simulation: Simulation, until_s: float) -> Outcome:
    outcome = simulation.run(until_s)
    assert outcome.state == "finished", outcome.reason
    return outcome


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("name", ["worker-1", "server-0"])
def test_who_comes_while_the_disk_is_full_waits_for_room_and_is_not_killed(name):
    simulation = begun(LONG_S, seconds=LONG_S + 20.0)
    kill(simulation, DEATH_S, name)
    found = []
    simulation.at(LONG_S - 0.5, lambda: found.append(states(simulation)))
    simulation.at(LONG_S + 10.0, lambda: found.append(states(simulation)))
    outcome = finish(simulation, LONG_S + 100.0)
    assert found[0][name] == ("starting", 2)
    assert found[1][name] == ("running", 2)
    assert outcome.store.texts("silent") == []


def test_a_server_waits_for_room_for_its_shard_however_long_that_takes():
    """There is room to put the next one on record, but none to write all that its log has anew."""
    simulation = begun(LONG_S, how="tight", durability="disk", seconds=LONG_S + 20.0)
    kill(simulation, DEATH_S, "server-0")
    found = []

    def look() -> None:
        (state, incarnation), rows = states(simulation)["server-0"], simulation.store.daemons
        found.append((state, incarnation, rows["server-0"]["phase"]))

    simulation.at(LONG_S - 0.5, look)
    simulation.at(LONG_S + 10.0, look)
    outcome = finish(simulation, LONG_S + 100.0)
    assert found == [("starting", 2, "waiting for room"), ("running", 2, "serving")]
    assert outcome.store.texts("silent") == []
    error = "no space left on device; free some space there; the server keeps retrying"
    assert outcome.store.texts("error") == [error], "once"


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("before_s", [0.4, 3.0, 17.0, 40.0])
@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("how", ["full", "tight"])
def test_every_server_is_back_soon_after_there_is_room_again(how, durability, before_s):
    """However seldom a message is sent again: nobody waits for that."""
    simulation = begun(
        SHORT_S, how=how, durability=durability, seconds=SHORT_S + 30.0, resend_s=6.0
    )
    for name in ("server-0", "server-1"):
        kill(simulation, SHORT_S - before_s, name)
    found: dict[str, tuple[str, int]] = {}
    simulation.at(SHORT_S + 5.0, lambda: found.update(states(simulation)))
    finish(simulation, SHORT_S + 100.0)
    assert {found["server-0"][0], found["server-1"][0]} == {"running"}


def test_who_dies_again_and_again_while_the_disk_is_full_does_not_end_the_run():
    """That may be what it dies of."""
    simulation = begun(SHORT_S, seconds=SHORT_S + 30.0)
    for number in range(50):
        for name in ("server-0", "worker-1"):
            simulation.at(FULL_S + 1.0 + number, lambda name=name: simulation.world.kill(name))
    found: dict[str, tuple[str, int]] = {}
    simulation.at(SHORT_S + 5.0, lambda: found.update(states(simulation)))
    outcome = finish(simulation, SHORT_S + 100.0)
    assert {state for state, _ in found.values()} == {"running"}
    assert outcome.store.daemons["server-0"]["restarts"] > 20


def test_a_run_without_room_for_its_shards_at_its_start_says_so_and_ends():
    simulation = begun(LONG_S, durability="disk", seconds=SHORT_S)
    simulation.at(0.2, lambda: setattr(simulation.world.disk, "full", 1))
    outcome = simulation.run(SHORT_S)
    assert outcome.state == "failed"
    assert re.fullmatch("server-.: no space left on device", outcome.reason)
    assert outcome.network.messages["Push"] == 0
    assert outcome.left_behind == []


def test_a_server_whose_log_is_full_ends_and_the_next_one_goes_on_when_there_is_room():
    """What nobody could write was never acknowledged."""
    simulation = begun(SHORT_S, durability="disk", seconds=SHORT_S + 20.0)
    found = []
    simulation.at(SHORT_S - 0.5, lambda: found.append(states(simulation)))
    outcome = finish(simulation, SHORT_S + 100.0)
    assert {found[0][name] for name in ("server-0", "server-1")} == {("starting", 2)}
    assert outcome.store.daemons["worker-0"]["restarts"] == 0


def test_one_that_waits_for_room_and_stands_still_is_killed_all_the_same():
    simulation = begun(SHORT_S, seconds=SHORT_S + 20.0)
    kill(simulation, DEATH_S, "worker-1")
    simulation.at(10.0, lambda: simulation.world.freeze("worker-1"))
    outcome = finish(simulation, SHORT_S + 100.0)
    assert outcome.store.texts("silent") == ["worker-1: no heartbeat for 6 s: it is killed"]


def test_one_that_hangs_when_there_is_room_again_is_killed_after_the_usual_time():
    simulation = begun(SHORT_S, seconds=SHORT_S + 30.0)
    kill(simulation, DEATH_S, "worker-1")
    simulation.at(SHORT_S - 0.1, lambda: simulation.world.network.cut(COORDINATOR, "worker-1"))
    simulation.at(SHORT_S + 9.0, lambda: simulation.world.network.heal(COORDINATOR, "worker-1"))
    outcome = finish(simulation, SHORT_S + 100.0)
    (killed,) = [row for row in outcome.store.events if row[1] == "silent"]
    assert killed[3].startswith("worker-1: ")
    assert SHORT_S + 4.9 < killed[0] < SHORT_S + 8.0


def test_a_first_start_that_waits_for_room_says_so_when_its_time_is_over():
    simulation = begun(SHORT_S, epochs=1.0)
    simulation.at(0.01, lambda: setattr(simulation.world.disk, "full", 1))
    outcome = simulation.run(100.0)
    assert outcome.state == "failed"
    assert outcome.reason.startswith("not ready in time; waiting for server-0, server-1, worker-0")
    assert outcome.reason.endswith(
        "; the run's database cannot be written: no space left on device"
    )


# ---------------------------------------------------------------- numbers that are known by others


def numbers(watcher: Watcher, field: str, before: Callable[[float], bool]) -> list[int]:
    return [getattr(sent, field) for at_s, _, _, sent in watcher.sent if before(at_s)]


def test_a_worker_that_is_added_after_a_full_disk_is_let_in_by_all_servers():
    """Lists of guests were made for a server that asked again and again, and none is on record;
    that its process was started is.
    """
    simulation = begun(SHORT_S, seconds=30.0)
    kill(simulation, FULL_S - 0.02, "server-0")
    kill(simulation, SHORT_S - 2.0, COORDINATOR)
    scaled = simulation.request(SHORT_S + 5.0, "scale", {"workers": 3})
    found = []
    simulation.at(SHORT_S + 20.0, lambda: found.append(states(simulation)))
    finish(simulation, SHORT_S + 100.0)
    assert simulation.world.process("server-0").incarnation == 2
    assert scaled.reply is not None
    assert scaled.reply.result["starting"] == ["worker-2"]
    assert found[0]["worker-2"] == ("running", 1)


def test_no_evaluation_after_a_full_disk_has_the_number_of_one_that_is_not_on_record():
    asked, answered = Watcher(m.Evaluate), Watcher(m.Evaluated)
    simulation = begun(SHORT_S, asked, answered, seconds=SHORT_S + 30.0, evaluate_epochs=1.0)
    dies_s = SHORT_S - 1.0
    kill(simulation, dies_s, COORDINATOR)
    finish(simulation, SHORT_S + 100.0)
    old = set(numbers(asked, "evaluation", lambda at_s: at_s < dies_s))
    new = set(numbers(asked, "evaluation", lambda at_s: at_s > dies_s))
    assert len(old) > 1
    assert len(new) > 1
    assert max(old) < min(new)
    assert {sent.evaluation for sent in answered.messages()} == old | new


# ---------------------------------------------------------------- what was agreed on a full disk


@pytest.mark.parametrize(("asked_s", "is_full"), [(FULL_S - 1.0, False), (FULL_S + 2.0, True)])
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("set", {"names": ["worker-0"], "settings": {"push": "1MB/s"}}),
        ("scale", {"workers": 3}),
        ("restart", {"names": ["worker-0"]}),
    ],
)
def test_who_asks_for_a_change_hears_that_it_is_on_no_record(verb, arguments, asked_s, is_full):
    simulation = begun(SHORT_S, epochs=2.0)
    client = simulation.request(asked_s, verb, arguments)
    simulation.run(FULL_S + 5.0)
    assert client.reply is not None
    assert client.reply.error == ""
    assert client.reply.result.get("unwritten", "") == (
        "no space left on device" if is_full else ""
    )


# ---------------------------------------------------------------- a stop on a full disk


STOP_S, GRACE_S = 12.0, 10.0
LAST_S = STOP_S + GRACE_S + SAVES_MAX * (SAVE_PAUSE_S + 1.0) + RECORD_S + EXIT_S
"""When a stop is over at the latest."""


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("room_s", [STOP_S + 6.0, STOP_S + 18.0, LONG_S])
@pytest.mark.parametrize("dead", [(), ("server-0",), ("server-0", "server-1")])
@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("how", ["full", "tight"])
def test_a_stop_while_a_server_waits_for_room_ends_in_time_with_a_reason(
    how, durability, dead, room_s
):
    """With a checkpoint if there is room in time; else it has failed, and its shards are kept."""
    simulation = begun(room_s, how=how, durability=durability, seconds=2 * LONG_S)
    for name in dead:
        kill(simulation, DEATH_S, name)
    simulation.request(STOP_S, "stop", {"grace_s": GRACE_S})
    outcome = simulation.run(2 * LONG_S)
    if room_s < LONG_S:
        assert (outcome.state, outcome.reason) == ("stopped", "stopped by dlctl stop")
        assert outcome.seconds < room_s + 10.0
        assert len(outcome.store.manifests) == 1
        return
    assert outcome.state == "failed"
    reason = "stopped by dlctl stop, but its last checkpoint failed: server-0: "
    assert outcome.reason.startswith(reason)
    assert re.search("has no room|no space left", outcome.reason)
    assert outcome.seconds < LAST_S
    assert sorted(outcome.store.states) == [0, 1]
