"""Checkpoints and logs of hosts that share no disk with the coordinator: out, back, and on the way
when something fails.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from simulated import ACCOUNT, Watcher, job_file, ledger_checkers

from dlctl.job.config import Host
from dlctl.job.placement import place
from dlctl.model.flat import slice_bounds
from dlctl.roles.protocol import files
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Checker
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults, Moment
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, Ledger
from dlctl.sim.simulation import Outcome, Simulation
from dlctl.sim.store import Store
from dlctl.wire import messages as m
from dlctl.wire.machine import Note, Send

pytestmark = pytest.mark.long

HOSTS = (Host(ssh="h1"), Host(ssh="h2"), Host(ssh="h3"))
TIMEOUTS = {"silent_s": 3.0, "host_s": 20.0, "grace_s": 20.0}
BAD_NETWORK = NetworkOptions(link=SimLink(loss=0.05, duplicate=0.05, reorder=0.05, late_s=0.2))

REAL = {name: getattr(files, name) for name in dir(files) if "BYTES" in name}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Files of a few kilobytes are as many pieces as real ones of megabytes."""
    monkeypatch.setattr(files, "PIECE_BYTES_FIRST", 64)
    monkeypatch.setattr(files, "PIECE_BYTES_MIN", 32)
    monkeypatch.setattr(files, "BYTES_MAX", 128)


def on_hosts(
    *,
    servers=2,
    workers=4,
    epochs=2,
    seed=0,
    store=None,
    faults=None,
    network=None,
    watchers=(),
    checked=True,
) -> Simulation:
    problem = Ledger(shards=2, samples=1024, cells=600)
    job = job_file(
        workers=workers, servers=servers, optimizer=ACCOUNT, batch_size=8, portion_batches=2,
        compression=("topk", {"density": 0.1}), checkpoint_s=3.0, hosts=HOSTS, timeouts=TIMEOUTS,
        epochs=float(epochs),
    )  # fmt: skip
    checkers = (
        ledger_checkers(problem, epochs, once=False, heal_at_s=30.0)
        if checked and not store
        else ()
    )
    return Simulation(
        job, problem, seed=seed, store=store, faults=faults or Faults(), network=network,
        compute=ComputeOptions(step_s=0.1, spread=0.1), checkers=(*checkers, *watchers),
    )  # fmt: skip


def good(store: Store) -> list[int]:
    """Numbers of the checkpoints that were completed; none of them may be damaged."""
    for directory in store.manifests:
        assert store.verify(directory) == []
    return sorted(number for number, row in store.checkpoints.items() if not row["error"])


def errors(store: Store) -> list[str]:
    return [row["error"] for row in store.checkpoints.values() if row["error"]]


def hosted(outcome: Outcome) -> list:
    """The processes of other hosts, their agents left out."""
    return [p for p in outcome.world.processes if p.name in place(outcome.world.job)]


class Once(Checker):
    """Does something at the `count`-th sending of such a message by a process of this name."""

    def __init__(self, name, kind, do, count=1, when=lambda process, message: True) -> None:
        self.name, self.kind, self.do, self.count, self.when = name, kind, do, count, when

    def on_effect(self, process, effect) -> None:
        if not isinstance(effect, Send) or not isinstance(effect.message, self.kind):
            return
        if process.name == self.name and self.when(process, effect.message):
            self.count -= 1
            if self.count == 0:
                self.do(process, effect.message)


def is_of_a_checkpoint(process, message) -> bool:
    return message.file.startswith("ckpt/")


class Restored(Checker):
    """What servers have at the moment when they say that they are restored."""

    def __init__(self) -> None:
        self.found = {}

    def on_effect(self, process, effect) -> None:
        if isinstance(effect, Note) and effect.text.startswith("restored from"):
            serving = process.machine.serving
            table = serving.parameters
            self.found[table.lo, table.hi] = serving.shard.w.copy()


def slices(servers: int) -> list[tuple[int, int]]:
    return [slice_bounds(1200, servers, index) for index in range(servers)]


# ---------------------------------------------------------------- out and back


def test_what_three_hosts_have_saved_is_here_whole_and_no_more_there():
    asked, taken = Watcher(m.ReadFile), Watcher(m.FileTaken)
    simulation = on_hosts(watchers=(asked, taken))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert good(outcome.store) == sorted(outcome.store.checkpoints)
    assert len(outcome.store.checkpoints) >= 3
    newest = outcome.store.manifests[outcome.store.newest()]
    assert [part["name"] for part in newest["shards"]] == ["server-0", "server-1"]
    assert len(newest["workers"]) == 4
    files = [q for q in asked.messages(COORDINATOR) if q.file.startswith("ckpt/")]
    assert max(q.offset for q in files) > 500, "they came in many pieces"
    for agent in ("agent-1", "agent-2", "agent-3"):
        assert outcome.world.host_disks.of(agent) == {}
    assert len(taken.sent) == 6 * len(outcome.store.checkpoints)


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("network", [None, BAD_NETWORK], ids=["good network", "bad network"])
def test_a_run_goes_on_from_a_checkpoint_that_its_hosts_have_to_fetch(servers, network):
    store = Store()
    first = on_hosts(store=store, epochs=1, network=network)
    first.run()
    before = first.world.weights()
    pieces, restored = Watcher(m.FileData), Restored()
    second = on_hosts(
        store=store, epochs=2, servers=servers, network=network, watchers=(pieces, restored)
    )  # fmt: skip
    outcome = second.run()
    assert outcome.state == "finished", store.texts("state")
    from_home = [piece for piece in pieces.messages(COORDINATOR) if not piece.error]
    assert {piece.file.rpartition("/")[2] for piece in from_home} == {
        "manifest.json", "shard-0.safetensors", "shard-1.safetensors",
        *(f"worker-{i}.safetensors" for i in range(4)),
    }  # fmt: skip
    assert restored.found.keys() == {(lo, hi) for lo, hi in slices(servers)}
    for (lo, hi), w in restored.found.items():
        assert np.array_equal(w, before[lo:hi])


def gone_from_the_checkpoint(file: str) -> tuple[Outcome, str]:
    """A run that goes on from a checkpoint without this file, and what is said about that."""
    store = Store()
    on_hosts(store=store, epochs=1).run()
    directory = store.newest()
    del store.files[directory][file]
    words = f"cannot fetch {directory}/{file} from the coordinator: there is no such file"
    return on_hosts(store=store, epochs=2).run(), words


def test_without_a_shard_of_its_checkpoint_a_run_ends_and_says_which():
    outcome, words = gone_from_the_checkpoint("shard-1.safetensors")
    assert outcome.state == "failed"
    assert outcome.reason == f"server-1: {words}"


def test_without_the_residual_of_a_worker_a_run_fails_and_the_log_says_why():
    outcome, words = gone_from_the_checkpoint("worker-3.safetensors")
    assert outcome.state == "failed"
    assert outcome.reason.startswith("worker-3 died ")
    assert words in outcome.store.mirrored["logs/worker-3.2.jsonl"].decode()


def test_lost_repeated_and_late_pieces_make_no_difference():
    outcome = on_hosts(network=BAD_NETWORK).run()
    assert outcome.state == "finished"
    assert errors(outcome.store) == []
    assert outcome.network.lost["FileData"]
    assert outcome.network.repeated["FileData"]


# ---------------------------------------------------------------- what fails on the way


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("agent", ["agent-1", "agent-3"])
def test_a_host_that_is_cut_off_for_a_while_sends_the_rest_when_it_is_back(agent):
    def cut(process, message) -> None:
        world = simulation.world
        world.cut_off(agent)
        world.timeline.after(8.0, lambda: world.join(agent))

    cutting = Once(agent, m.FileData, cut, count=100)
    simulation = on_hosts(watchers=(cutting,), epochs=3)
    outcome = simulation.run()
    assert cutting.count <= 0
    assert outcome.state == "finished", outcome.store.texts("state")
    assert errors(outcome.store) == []
    slowest = max(row["seconds"] for row in outcome.store.checkpoints.values())
    assert slowest < 20


def losing(agent: str, **options) -> Simulation:
    """A run in which this host is lost for good when it sends the first checkpoint."""

    def lose(process, message) -> None:
        simulation.world.timeline.after(0.0, lambda: simulation.world.lose_host(agent))

    loss = Once(agent, m.FileData, lose, 3, is_of_a_checkpoint)
    simulation = on_hosts(watchers=(loss,), **options)
    return simulation


def test_a_host_of_workers_that_is_lost_on_the_way_is_done_without():
    simulation = losing("agent-3", epochs=3)
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert good(outcome.store) == sorted(outcome.store.checkpoints)
    first = outcome.store.checkpoints[1]
    assert 3 < first["seconds"] < 4, "as soon as it is missed"


def test_a_shard_that_is_lost_on_the_way_fails_its_checkpoint_in_words():
    outcome = losing("agent-2").run()
    assert outcome.state == "failed"
    assert errors(outcome.store) == ["server-1: the host h2 has not been reached for 20 s"]
    assert not outcome.store.manifests


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("count", [40, 60, 80, 100])
def test_a_coordinator_that_dies_on_the_way_leaves_it_to_its_successor(count):
    """Its successor begins another checkpoint, and goes on copying logs where it stood."""
    moment = Moment(name=COORDINATOR, kind="FileData", count=count, direction="received")
    outcome = on_hosts(faults=Faults(moments=(moment,)), epochs=3).run()
    assert outcome.state == "finished", outcome.store.texts("state")
    coordinators = [p for p in outcome.world.processes if p.name == COORDINATOR]
    assert len(coordinators) == 2
    assert good(outcome.store)
    assert_logs_are_whole(outcome)


def test_a_byte_that_was_changed_on_the_way_is_found_out():
    def damage(process, message) -> None:
        disk = simulation.world.host_disks.of("agent-1")
        (file,) = (file for file in disk if file.endswith(message.file))
        content = bytearray(disk[file])
        content[100] ^= 1
        disk[file] = bytes(content)

    simulation = on_hosts(watchers=(Once("server-0", m.Saved, damage),))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert errors(outcome.store) == [
        "server-0: its file was not received from agent-1: "
        "what has come is not what was saved there"
    ]  # fmt: skip
    assert good(outcome.store)[-1] == max(outcome.store.checkpoints)


def test_a_server_that_dies_when_its_file_is_saved_leaves_it_to_its_agent():
    def kill(process, message) -> None:
        simulation.world.timeline.after(0.0, lambda: simulation.world.kill("server-1"))

    simulation = on_hosts(watchers=(Once("server-1", m.Saved, kill),))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert errors(outcome.store) == []


def test_a_large_file_on_a_slow_link_does_not_keep_its_agent_from_being_heard(monkeypatch):
    """Eight seconds of bytes: an agent is lost after three of silence."""
    for name in ("PIECE_BYTES_FIRST", "PIECE_BYTES_MIN", "BYTES_MAX"):
        monkeypatch.setattr(files, name, REAL[name])
    slow = {("agent-1", COORDINATOR): SimLink(bytes_per_s=100e3)}
    job = job_file(
        servers=1, workers=3, algorithm=("downpour", {"push_every_steps": 50}), hosts=HOSTS,
        timeouts=TIMEOUTS, checkpoint_s=2.0, seconds=6.0,
    )  # fmt: skip
    simulation = Simulation(
        job, LeastSquares(size=200_000, samples=32), network=NetworkOptions(links=slow),
        compute=ComputeOptions(step_s=1.0, spread=0.1),
    )  # fmt: skip
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert outcome.store.texts("silent") == []
    assert errors(outcome.store) == []
    assert min(row["seconds"] for row in outcome.store.checkpoints.values()) > 8
    assert outcome.store.verify(outcome.store.newest()) == []
    pieces = outcome.network.messages["FileData"]
    assert outcome.network.nbytes["FileData"] < 1.3 * sum(
        row["nbytes"] for row in outcome.store.checkpoints.values()
    ), pieces


# ---------------------------------------------------------------- logs and acks


def assert_logs_are_whole(outcome: Outcome) -> None:
    mirrored = outcome.store.mirrored
    for process in hosted(outcome):
        copy = mirrored.get(f"logs/{process}.jsonl", b"")
        assert copy.decode() == process.log.decode(), str(process)
        assert bytes(mirrored.get(f"acks/{process}", b"")) == process.acks


def test_at_the_end_of_a_run_all_logs_are_here_to_their_last_line():
    outcome = on_hosts(network=BAD_NETWORK).run()
    assert outcome.state == "finished"
    assert_logs_are_whole(outcome)
    assert all(json.loads(p.acks) for p in hosted(outcome) if p.name.startswith("worker"))
    assert not [key for key in outcome.store.memory if key.startswith("log/worker")]


def test_logs_come_while_the_run_goes_on_those_of_dead_processes_included():
    simulation = on_hosts()
    simulation.at(4.0, lambda: simulation.world.kill("worker-2"))
    seen = []

    def look() -> None:
        first = next(p for p in simulation.world.processes if p.name == "worker-2")
        copy = simulation.store.mirrored["logs/worker-2.1.jsonl"]
        seen.append(bytes(copy) == bytes(first.log) and first.log != b"")

    simulation.at(5.2, look)
    assert simulation.run().state == "finished"
    assert seen == [True]


def test_nobody_waits_for_ever_for_the_lines_of_a_host_that_is_cut_off():
    cut_at = []

    def cut(process, message) -> None:
        cut_at.append(process.timeline.now)
        simulation.world.cut_off("agent-3")

    def is_at_its_end(process, message) -> bool:
        end = process.machine.run.shutdown
        return end is not None and end.step == "collecting"

    cutting = Once(COORDINATOR, m.ReadFile, cut, when=is_at_its_end)
    simulation = on_hosts(watchers=(cutting,), checked=False)
    outcome = simulation.run()
    assert outcome.state == "finished", outcome.store.texts("state")
    left_at = next(at for at, kind, _, text in outcome.store.events if text[:9] == "finished:")
    assert 2 < left_at - cut_at[0] < 6


def test_an_agent_answers_for_the_files_of_its_own_host_only():
    """Under another name, or for a file that it was not asked for, nothing is written."""
    refused = []

    def intrude(process, message) -> None:
        coordinator = simulation.world.process(COORDINATOR)
        own = message.file
        for name, file in (("agent-2", own), ("agent-1", "logs/server-1.1.jsonl")):
            piece = m.FileData(name, message.request, file, 1, 0, 5, b"false", "")
            refused.append(len(simulation.world.trace))
            process.network.send(process, COORDINATOR, piece)
        assert coordinator.alive

    simulation = on_hosts(watchers=(Once("agent-1", m.FileData, intrude, count=5),))
    outcome = simulation.run()
    assert outcome.state == "finished"
    assert any("agent-1 speaks for agent-2" in line for line in outcome.world.trace)
    assert_logs_are_whole(outcome)


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("seed", range(5))
def test_faults_of_all_kinds_leave_only_whole_checkpoints_and_true_logs(seed):
    faults = Faults(
        kills=2, server_kills=1, agent_kills=1, coordinator_kills=1, freezes=1, cuts=2,
        partitions=1, half_opens=1, resets=2, full_disks=1, save_errors=0.05, heal_at_s=10.0,
    )  # fmt: skip
    outcome = on_hosts(faults=faults, seed=seed, network=BAD_NETWORK, epochs=3).run()
    assert outcome.state == "finished", outcome.store.texts("state")
    assert good(outcome.store)
    assert not outcome.world.living()
    for process in hosted(outcome):
        copy = outcome.store.mirrored.get(f"logs/{process}.jsonl", b"")
        assert bytes(process.log).startswith(bytes(copy)), str(process)
