"""Each kind of fault does what it says, and no more: tried one by one, where it can be seen."""

from itertools import pairwise

import pytest
from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.sim.crashpoints import PointCrash
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.network import RECONNECT_S
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.wire import messages as m
from dlctl.wire.machine import Note

pytestmark = pytest.mark.long
SLOW_STEPS = ComputeOptions(step_s=0.1)


def simulation(
    seed: int = 0,
    checkers: tuple = (),
    durability: str = "process",
    resend_s: float = 0.3,
    **faults,
) -> Simulation:
    """A run of about four seconds with one kind of fault in it."""
    problem = Ledger(shards=2, cells=300)
    job = job_file(
        3, 2, optimizer=ACCOUNT, batch_size=4, portion_batches=2, epochs=6.0, checkpoint_s=0.5,
        timeouts={"resend_s": resend_s}, durability=durability,
    )  # fmt: skip
    options = Faults(**({"from_s": 1.0, "heal_at_s": 3.0} | faults))
    return Simulation(
        job, problem, seed, compute=SLOW_STEPS, faults=options,
        checkers=(*ledger_checkers(problem, 6, once=False, heal_at_s=options.heal_at_s), *checkers),
    )  # fmt: skip


def run(seed: int = 0, **faults) -> Outcome:
    outcome = simulation(seed, **faults).run(100.0)
    assert outcome.state == "finished", outcome.reason
    return outcome


def lost(outcome: Outcome) -> int:
    return sum(count for kind, count in outcome.network.lost.items() if kind != "Members")


# ---------------------------------------------------------------- the network


@pytest.mark.parametrize("kind", ["cuts", "partitions", "half_opens", "resets"])
@pytest.mark.parametrize("seed", range(5))
def test_what_befalls_the_network_costs_messages_and_nothing_else(kind, seed):
    assert lost(run(seed, **{kind: 4})) > 1


def test_in_a_partition_the_two_groups_hear_nothing_of_each_other():
    sim = simulation()
    network = sim.world.network
    group, others = ("worker-0", "worker-1"), ("coordinator", "server-0", "server-1")

    def cut(way) -> None:
        for one in group:
            for other in others:
                way(one, other)
                way(other, one)

    sim.at(1.5, lambda: cut(network.cut))
    sim.at(2.5, lambda: cut(network.heal))
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    lines = [line for line in outcome.trace if 1.5 < float(line.split()[0]) < 2.5]
    across = [line for line in lines if " worker-0 > s" in line or " > worker-0 " in line]
    assert across
    assert all(line.endswith(" lost") for line in across)
    assert any("worker-2 > server-0 Push" in line for line in lines), "the others go on"


def test_a_half_open_connection_swallows_one_direction_until_it_breaks():
    sim = simulation()
    network = sim.world.network
    sim.at(1.5, lambda: network.half_open("worker-0", "server-0", upward=False))
    sim.at(2.5, lambda: network.reset("worker-0"))
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    during = [line for line in outcome.trace if 1.51 < float(line.split()[0]) < 2.5]
    answers = [line for line in during if "server-0 > worker-0" in line]
    assert answers
    assert all(line.endswith(" lost") for line in answers)
    assert any("worker-0 > server-0 Push" in line and "lost" not in line for line in during)


def test_what_a_broken_connection_has_swallowed_is_sent_again_as_soon_as_there_is_another():
    sim = simulation(resend_s=30.0)
    network = sim.world.network
    watcher = Watcher(m.Push, m.Fetch)
    sim.world.observers.append(watcher)
    sim.at(1.5, lambda: network.half_open("worker-0", "server-0", upward=True))
    sim.at(2.5, lambda: network.reset("worker-0"))
    outcome = sim.run(100.0)
    assert outcome.state == "finished"

    def sent(since: float, until: float) -> list[tuple[str, int]]:
        return [
            (
                type(message).__name__,
                message.seq if isinstance(message, m.Push) else message.request,
            )
            for at, name, peer, message in watcher.sent
            if (name, peer) == ("worker-0", "server-0") and since < at < until
        ]

    swallowed, again = sent(1.51, 2.5), sent(2.5, 2.5 + RECONNECT_S + 0.0015)
    assert len(swallowed) > 2
    assert sorted(again) == sorted(swallowed), "each once, and not by a timer"
    assert not [line for line in outcome.trace if " server-0 > worker-0 JoinAgain " in line]


def test_what_the_coordinator_has_sent_over_it_is_sent_again_to_who_comes_with_another():
    sim = simulation()
    network, watcher = sim.world.network, Watcher(m.ChangeSettings)
    sim.world.observers.append(watcher)
    sim.at(1.5, lambda: network.half_open("worker-0", "coordinator", upward=False))
    sim.request(1.6, "set", {"names": ["worker-0"], "settings": {"push_every_steps": "2"}})
    sim.at(2.0, lambda: network.reset("worker-0"))
    assert sim.run(100.0).state == "finished"
    sent = [at for at, name, _, _ in watcher.sent if name == "coordinator"]
    assert sent[0] == pytest.approx(1.6, abs=0.01)
    assert sent[1] == pytest.approx(1.9, abs=0.01), "resend_s later"
    assert sent[2:] == [pytest.approx(2.0 + RECONNECT_S, abs=0.02)], "and not 0.6 s later"


# ---------------------------------------------------------------- disks and clocks


def test_while_the_disk_is_full_checkpoints_fail_and_training_goes_on():
    outcome = run(full_disks=3, full_disk_s=2.0)
    rows = outcome.store.checkpoints.values()
    errors = {row["error"] for row in rows if row["error"]}
    assert errors
    assert all("no space left on device" in error for error in errors)
    assert not outcome.store.manifests[outcome.store.newest()].get("error")
    assert outcome.store.verify(outcome.store.newest()) == []


def test_a_slow_disk_holds_checkpoints_up_and_no_push():
    def longest_pause(sim: Simulation) -> float:
        acks = Watcher(m.Ack)
        sim.world.observers.append(acks)
        assert sim.run(100.0).state == "finished"
        times = [at for at, *_ in acks.sent if 1.0 < at < 3.0]
        return max(b - a for a, b in pairwise(times))

    slow, usual = simulation(slow_disks=8, slow_save_s=5.0), simulation()
    assert longest_pause(slow) < longest_pause(usual) + 0.05
    assert len(slow.store.checkpoints) < len(usual.store.checkpoints)


def test_nothing_depends_on_the_wall_clock():
    """With five jumps of up to a day the run is the same to the last byte but for its stamps."""
    still, jumping = simulation(), simulation(clock_jumps=5)
    first, second = still.run(100.0), jumping.run(100.0)
    assert jumping.injector.struck["clock jump"] == 5
    assert first.trace == second.trace
    assert first.store.events == second.store.events
    apart = [abs(a - b) for a, b in zip(first.store.stamps, second.store.stamps, strict=True)]
    assert apart[0] == 0.0
    assert max(apart) > 3600.0


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("block", range(4))
def test_a_worker_that_was_given_up_comes_back_and_is_fenced(block):
    fenced = 0
    for seed in range(3 * block, 3 * block + 3):
        sim = simulation(seed, ghosts=2, ghost_s=2.0)
        assert sim.run(100.0).state == "finished"
        fenced += sum(p.status == 75 for p in sim.world.processes if p.given_up)
    assert fenced > 1


@pytest.mark.parametrize("block", range(4))
def test_a_frozen_coordinator_or_agent_is_waited_for(block):
    for seed in range(3 * block, 3 * block + 3):
        outcome = run(seed, control_freezes=3, freeze_s=2.0)
        assert not outcome.store.texts("silent"), seed


def test_a_coordinator_that_stands_still_for_too_long_is_ended_by_its_agent():
    sim = simulation(heal_at_s=60.0)
    sim.at(1.5, lambda: sim.world.freeze("coordinator"))
    sim.run(1.5 + 2 * sim.world.job.timeouts.silent_s)
    assert sim.world.coordinator.incarnation == 1
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    assert (sim.world.processes[0].status, sim.world.coordinator.incarnation) == (-9, 2)


def test_an_agent_that_died_with_its_coordinator_is_said_to_have_been_found_gone():
    """Nobody has seen it, but the one that is started in its place is not the same."""
    sim = simulation()

    def kill() -> None:
        for name in ("coordinator", "agent-0"):
            sim.world.kill(name)
        sim.world.recover(0.5)

    sim.at(1.5, kill)
    outcome = sim.run(100.0)
    assert (outcome.state, outcome.store.daemons["agent-0"]["incarnation"]) == ("finished", 2)
    assert outcome.store.daemons["agent-0"]["restarts"] == 1
    assert [text for text in outcome.store.texts("exit") if text.startswith("agent-0 ended: gone")]


def test_nobody_judges_a_coordinator_while_he_stands_still_himself():
    sim = simulation(heal_at_s=60.0)
    for name in ("coordinator", "agent-0"):
        sim.at(1.5, lambda name=name: sim.world.freeze(name))
        sim.at(50.0, lambda name=name: sim.world.thaw(name))
    outcome = sim.run(100.0)
    assert (outcome.state, sim.world.coordinator.incarnation) == ("finished", 1)


def test_who_stands_still_about_as_long_as_he_is_waited_for_comes_back_or_is_replaced():
    replaced, back = set(), set()
    for seed in range(20):
        sim = simulation(seed, long_freezes=1, begin_until_s=3.0, heal_at_s=60.0)
        assert sim.run(100.0).state == "finished"
        (who,) = {p for p in sim.world.processes if f"{p} is frozen" in "\n".join(sim.world.trace)}
        (replaced if who.status == -9 else back).add(who.name.partition("-")[0])
    assert replaced == {"worker", "server", "agent", "coordinator"}
    assert back


@pytest.mark.parametrize("name", ["agent-0", "server-0", "worker-0"])
def test_a_process_that_is_frozen_before_it_has_begun_begins_later(name):
    sim = simulation()
    sim.run(0.0)
    while name not in sim.world.living():
        assert sim.world.timeline.step(1.0)
    sim.world.freeze(name)
    sim.world.thaw(name)
    assert sim.run(100.0).state == "finished"


def test_a_crash_point_ends_a_process_in_the_middle_of_an_event():
    """Nothing of that event gets out: no effect, no message, not even the end of its handler."""
    sim = simulation()
    world = sim.world
    world.crash_points.armed.append(PointCrash(name="worker-1", point="here", count=3))

    def plant() -> None:
        process = world.process("worker-1")
        point, honest = world.crash_points.hook(process), process.machine.handle

        def handle(event, now):
            effects = honest(event, now)
            point("here")
            return [Note("info", "past the point"), *effects]

        process.machine.handle = handle

    sim.at(1.2, plant)
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    assert sum("worker-1.1 info: past the point" in line for line in outcome.trace) == 2
    assert any("worker-1.1 crashes at here" in line for line in outcome.trace)
    assert world.process("worker-1").incarnation == 2


def test_when_everything_is_killed_at_once_the_next_start_goes_on_from_the_checkpoint():
    job = job_file(2, 2, epochs=6.0, checkpoint_s=0.5)
    faults = Faults(blackouts=1, from_s=2.0, heal_at_s=2.5)
    first = Simulation(job, LeastSquares(), compute=SLOW_STEPS, faults=faults).run(100.0)
    assert first.left_behind == []
    assert first.store.run["state"] == "running"
    again = Simulation(job, LeastSquares(), compute=SLOW_STEPS, store=first.store).run(100.0)
    assert again.state == "finished"
    assert again.store.run["step"] == 192


@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("seed", range(5))
def test_when_everything_is_killed_at_once_a_run_that_is_brought_back_has_lost_nothing(
    durability, seed
):
    sim = simulation(seed, recoveries=2, durability=durability)
    outcome = sim.run(100.0)
    assert (outcome.state, sim.injector.struck["recovery"]) == ("finished", 2)
    back = outcome.store.texts("recover")
    assert back == ["the coordinator is back: it goes on where it was"] * len(back)
    assert back
    assert outcome.store.resume == "", "nothing was done again from a checkpoint"


def test_nobody_brings_a_run_back_while_there_is_no_room():
    sim = simulation(heal_at_s=5.0)
    world = sim.world

    def befall() -> None:
        world.disk.full += 1
        for process in list(world.processes):
            world.kill(process.name)
        world.recover(0.5)

    sim.at(1.5, befall)
    sim.at(4.0, lambda: setattr(world.disk, "full", 0))
    outcome = sim.run(100.0)
    assert outcome.state == "finished"
    starts = [float(line.split()[0]) for line in outcome.trace if " coordinator.2 starts" in line]
    assert [4.0 <= at < 6.0 for at in starts] == [True]


def test_a_run_that_has_ended_is_not_brought_back():
    sim = simulation()
    assert sim.run(100.0).state == "finished"
    sim.world.recover(0.0)
    assert sim.world.over()


def test_another_coordinator_can_be_started_and_finds_the_records_of_the_first():
    sim = simulation()
    world, found = sim.world, []

    def past():
        found.append(sim.store.past())
        return found[0]

    sim.at(1.5, lambda: (world.kill("coordinator"), world.restart_coordinator(past)))
    sim.run(2.0)
    assert not world.over()
    sim.run(2.6)
    assert (world.coordinator.alive, world.coordinator.incarnation) == (True, 2)
    assert found[0].terms["worker-0"] == 1
    assert {p.name for p in world.children("server", "worker")} >= {"server-0", "server-1"}
