"""Limits, live settings, evaluations, checkpoints and ends of runs, in virtual time."""

import numpy as np
import pytest
from simulated import ACCOUNT, Spy, Watcher, job_file, ledger_checkers

from dlctl import registry
from dlctl.sim.crashpoints import PointCrash
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, Ledger, WithBuffers
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Parameters, Push

ALONE = ("downpour", {"overlap": False})
STEADY = ComputeOptions(step_s=0.05, spread=0.0)


class Poisoned(LeastSquares):
    """Some rows give a gradient that is no number."""

    def __init__(self, rows: set[int], **options) -> None:
        super().__init__(**options)
        self.rows = rows

    def gradient(self, w, batch):
        loss, gradient = super().gradient(w, batch)
        if self.rows & set(batch.rows.tolist()):
            gradient[3] = np.nan
        return loss, gradient


def total(gradients: list[np.ndarray]) -> np.ndarray:
    return np.sum(gradients, axis=0, dtype=np.float64)


# ---------------------------------------------------------------- byte rates


def fastest(sent: list[tuple[float, int]], rate: float) -> float:
    """The most bytes by which any stretch of time is ahead of `rate`."""
    ahead = 0.0
    for i, (begin, _) in enumerate(sent):
        for j in range(i, len(sent)):
            nbytes = sum(n for _, n in sent[i : j + 1])
            ahead = max(ahead, nbytes - rate * (sent[j][0] - begin))
    return ahead


@pytest.mark.parametrize(("direction", "kind"), [("push", Push), ("fetch", Parameters)])
def test_a_limit_holds_over_every_stretch_of_time_but_for_one_message(direction, kind):
    messages = Watcher(kind)
    job = job_file(servers=2, algorithm=ALONE, epochs=2.0, **{direction: "2kB/s"})
    problem = LeastSquares(size=100)
    outcome = Simulation(job, problem, checkers=(messages,)).run()
    sent = [(at, 200) for at, _, _, _ in messages.sent]
    assert outcome.state == "finished"
    assert len(sent) > 100
    assert 0 < fastest(sent, 2000.0) <= 200 + 1e-6
    assert sent[-1][0] - sent[0][0] == pytest.approx(200 * len(sent) / 2000, rel=0.05)


@pytest.mark.long
def test_a_limit_that_is_raised_while_the_run_goes_on_helps_at_once():
    messages = Watcher(Push)
    job = job_file(epochs=20.0, push="400B/s")
    simulation = Simulation(job, LeastSquares(size=100), compute=STEADY, checkers=(messages,))
    change = {"names": ["worker-0"], "settings": {"push": "off"}}
    asked = simulation.request(10.0, "set", change)
    simulation.run()
    before = [at for at, _, _, _ in messages.sent if at < 10.0]
    after = [at for at, _, _, _ in messages.sent if 10.1 < at < 15.0]
    assert len(before) <= 10
    assert len(after) > 80
    (row,) = asked.reply.result["changes"]
    assert (row["name"], row["key"], row["before"], row["after"]) == (
        "worker-0", "push", 400.0, None,
    )  # fmt: skip
    assert asked.reply.result["missing"] == []


# ---------------------------------------------------------------- live settings


def test_every_live_setting_takes_effect_while_the_run_goes_on():
    pushes = Watcher(Push)
    job = job_file(
        compression=("topk", {"density": 0.5}), optimizer=("sgd", {"lr": 0.01}), epochs=10.0
    )
    simulation = Simulation(job, LeastSquares(size=20), compute=STEADY, checkers=(pushes,))
    for_worker = {"push_every_steps": "4", "fetch_every_steps": "2", "density": "0.1"}
    simulation.request(
        3.0, "set", {"names": ["worker-0"], "settings": for_worker | {"inner_lr": "0.125"}}
    )
    simulation.request(3.0, "set", {"names": ["server-0"], "settings": {"lr": "0.5"}})
    outcome = simulation.run()
    sizes = {at: (p.samples // 8, p.delta.arrays[0].size) for at, _, _, p in pushes.sent}
    assert {size for at, size in sizes.items() if at < 3.0} == {(1, 10)}
    assert {size for at, size in sizes.items() if 3.3 < at < 10.0} == {(4, 2)}
    values = outcome.world.machine("worker-0").settings.values()
    assert (values["inner_lr"], values["fetch_every_steps"]) == (0.125, 2)
    assert outcome.world.machine("server-0").serving.shard.optimizer.lr == 0.5


@pytest.mark.long
def test_a_replaced_worker_has_the_settings_that_were_changed_and_not_the_job_files():
    job = job_file(workers=2, seconds=8.0)
    simulation = Simulation(job, LeastSquares(), compute=STEADY)
    change = {"names": ["worker-1"], "settings": {"push_every_steps": "4", "push": "1MB/s"}}
    simulation.request(2.0, "set", change)
    simulation.at(3.0, lambda: simulation.world.kill("worker-1"))
    outcome = simulation.run()
    settings = outcome.world.machine("worker-1").settings.values()
    assert outcome.world.process("worker-1").incarnation == 2
    assert (settings["push_every_steps"], settings["push"]) == (4, 1e6)


@pytest.mark.long
def test_a_change_names_the_daemons_that_did_not_answer():
    job = job_file(workers=2, seconds=20.0)
    simulation = Simulation(job, LeastSquares(), compute=STEADY)
    simulation.at(2.0, lambda: simulation.world.freeze("worker-1"))
    change = {"names": ["worker-0", "worker-1"], "settings": {"inner_lr": "0.5"}}
    asked = simulation.request(3.0, "set", change)
    simulation.at(10.0, lambda: simulation.world.thaw("worker-1"))
    outcome = simulation.run()
    assert asked.reply.result["missing"] == ["worker-1"]
    assert [row["name"] for row in asked.reply.result["changes"]] == ["worker-0"]
    assert outcome.state == "finished"


# ---------------------------------------------------------------- evaluations


def test_evaluations_come_at_their_interval_and_the_last_one_is_of_the_final_parameters():
    problem = LeastSquares()
    job = job_file(workers=2, evaluate_epochs=0.5, epochs=4.0)
    outcome = Simulation(job, problem).run()
    assert 8 <= len(outcome.store.texts("evaluation")) <= 9
    assert outcome.store.run["evaluation"] == problem.evaluate(outcome.weights)
    assert outcome.store.run["evaluation_step"] == outcome.store.run["step"] == 128


def test_the_replicas_buffers_are_averaged_by_the_samples_that_each_has_seen():
    job = job_file(workers=2, servers=2, epochs=2.0)
    slow = ComputeOptions(step_s=0.01, spread=0.0, slow={1: 3.0})
    outcome = Simulation(job, WithBuffers(), compute=slow).run()
    workers = [outcome.world.machine(f"worker-{i}").training for i in (0, 1)]
    seen = [worker.accounts.rates.total["samples"] for worker in workers]
    assert sum(seen) == 512
    assert seen[0] > 1.5 * seen[1]
    average = outcome.world.machine("server-0").serving.buffers.average()
    assert average == pytest.approx([1 + (seen[0] ** 2 + seen[1] ** 2) / 512])


@pytest.mark.parametrize(
    ("durability", "point", "count"),
    [("process", "vector filled", 1), ("process", "extras filled", 1), ("disk", "base written", 2)],
)
def test_a_server_that_dies_while_its_buffers_are_set_has_them_in_the_end(durability, point, count):
    faults = Faults(points=(PointCrash(name="server-0", point=point, count=count),), heal_at_s=6.0)
    job = job_file(2, 2, epochs=2.0, durability=durability)
    slow = ComputeOptions(step_s=0.1, build_s=0.1)
    outcome = Simulation(job, WithBuffers(), 1, compute=slow, faults=faults).run(100)
    assert outcome.world.crash_points.crashes == 1
    assert (outcome.state, outcome.reason) == ("finished", "2 epochs are done")
    server = outcome.world.machine("server-0")
    assert server.registration.incarnation == 2
    assert server.serving.buffers.average()[0] > 1


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("servers", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_stopped_run_goes_on_exactly_where_it_was(optimizer, servers):
    options = {"optimizer": (optimizer, {"lr": 0.1}), "algorithm": ALONE, "epochs": 4.0}
    whole = Simulation(job_file(servers=servers[0], **options), LeastSquares()).run()

    first = Simulation(job_file(servers=servers[0], **options), LeastSquares())
    first.request(0.9, "stop", {})
    stopped = first.run()
    done = stopped.store.run["step"]
    assert stopped.state == "stopped"
    assert 0 < done < whole.store.run["step"]
    assert stopped.store.verify(stopped.store.newest()) == []

    job = job_file(servers=servers[1], **options)
    resumed = Simulation(job, LeastSquares(), seed=9, store=stopped.store).run()
    assert (resumed.state, resumed.store.run["step"]) == ("finished", whole.store.run["step"])
    assert np.array_equal(resumed.weights, whole.weights)
    assert resumed.store.run["samples"] == whole.store.run["samples"] == 1024


def test_what_a_worker_had_not_sent_is_in_the_checkpoint_and_goes_on_with_it():
    """Top-k leaves most of a gradient behind: the sum over both executions misses none of it."""
    problem = Spy()
    job = job_file(workers=2, servers=2, compression=("topk", {"density": 0.2}), epochs=4.0)
    first = Simulation(job, problem)
    first.request(0.8, "stop", {})
    stopped = first.run()
    assert stopped.state == "stopped"
    resumed = Simulation(job, problem, store=stopped.store).run()
    assert resumed.state == "finished"
    residuals = [resumed.world.machine(f"worker-{i}").training.side.residual for i in (0, 1)]
    assert np.abs(total(residuals)).max() > 1e-3
    assert np.allclose(resumed.weights, -0.1 * (total(problem.given) - total(residuals)), atol=1e-4)


@pytest.mark.long
def test_terms_go_on_counting_over_executions():
    job = job_file(workers=2, servers=2, epochs=8.0)
    first = Simulation(job, LeastSquares())
    first.request(0.8, "stop", {})
    store = first.run().store
    second = Simulation(job, LeastSquares(), store=store)
    assert second.run().state == "finished"
    assert len(set(store.issued)) == len(store.issued)
    assert store.terms == {"server-0": 2, "server-1": 2, "worker-0": 2, "worker-1": 2}


def test_checkpoints_are_made_while_pushes_go_on_and_every_one_of_them_is_whole():
    problem = Ledger(shards=2)
    job = job_file(
        workers=3, servers=2, optimizer=ACCOUNT, batch_size=4, checkpoint_s=0.15, epochs=4.0
    )
    simulation = Simulation(
        job, problem, compute=STEADY, checkers=ledger_checkers(problem, 4, once=True)
    )
    outcome = simulation.run()
    store = outcome.store
    assert len(store.checkpoints) >= 4
    assert len(store.manifests) == 3, "older ones are removed"
    for directory in store.manifests:
        assert store.verify(directory) == []


@pytest.mark.long
@pytest.mark.per_commit(1)
@pytest.mark.parametrize("block", range(4))
def test_a_save_request_that_comes_twice_does_not_change_a_file_behind_the_manifest(block):
    for seed in range(2 * block, 2 * block + 2):
        network = NetworkOptions(link=SimLink(duplicate=0.5, late_s=0.3))
        job = job_file(workers=2, servers=2, checkpoint_s=0.2, epochs=4.0)
        outcome = Simulation(job, LeastSquares(), seed, network=network, compute=STEADY).run()
        for directory in outcome.store.manifests:
            assert outcome.store.verify(directory) == [], seed


def test_a_full_disk_fails_the_checkpoint_and_not_the_run():
    job = job_file(workers=2, checkpoint_s=0.2, epochs=8.0)
    faults = Faults(save_errors=1.0, heal_at_s=1.2)
    outcome = Simulation(job, LeastSquares(), compute=STEADY, faults=faults).run()
    rows = list(outcome.store.checkpoints.values())
    assert outcome.state == "finished"
    assert "no space left on device" in rows[0]["error"]
    assert rows[-1]["error"] == ""
    assert outcome.store.run["checkpoint_error"] == ""


# ---------------------------------------------------------------- ends


def test_when_a_run_stops_nothing_stays_behind_in_the_workers():
    problem = Spy()
    job = job_file(workers=3, servers=2, algorithm=("downpour", {"push_every_steps": 5}))
    simulation = Simulation(job, problem, compute=STEADY)
    asked = simulation.request(0.8, "stop", {})
    outcome = simulation.run()
    assert outcome.state == "stopped"
    assert asked.reply.result["state"] == "stopped"
    assert len(problem.given) < 64, "it was stopped in its middle"
    assert np.allclose(outcome.weights, -0.1 * total(problem.given), rtol=1e-4, atol=1e-5)


def test_a_killed_run_ends_at_once_and_saves_nothing():
    simulation = Simulation(job_file(workers=2, epochs=100.0), LeastSquares())
    asked = simulation.request(2.0, "stop", {"kill": True})
    outcome = simulation.run()
    assert (outcome.state, outcome.left_behind) == ("stopped", [])
    assert outcome.seconds < 2.2
    assert asked.reply.done
    assert outcome.store.manifests == {}


def test_a_stop_by_signal_is_an_orderly_stop():
    simulation = Simulation(job_file(workers=2, epochs=100.0), LeastSquares())
    simulation.at(2.0, lambda: simulation.world.process("coordinator").signal(15))
    outcome = simulation.run()
    assert (outcome.state, outcome.left_behind) == ("stopped", [])
    assert len(outcome.store.manifests) == 1


@pytest.mark.per_commit(1)
@pytest.mark.parametrize("arguments", [{}, {"kill": True}, {"checkpoint": False}], ids=str)
@pytest.mark.parametrize("algorithm", ["downpour", "sync"])
@pytest.mark.parametrize("first_s", [0.0, 0.06, 0.12])
def test_a_run_can_be_stopped_at_any_time_from_its_first_moment_on(first_s, algorithm, arguments):
    for when_s in np.arange(first_s, 1.5, 0.18):
        job = job_file(workers=2, servers=2, algorithm=(algorithm, {}), epochs=50.0)
        simulation = Simulation(job, LeastSquares(), compute=STEADY)
        asked = simulation.request(float(when_s), "stop", arguments)
        outcome = simulation.run(60.0)
        assert (outcome.state, outcome.left_behind) == ("stopped", []), when_s
        assert asked.reply.done
        assert outcome.seconds < when_s + 2.0
        assert not arguments or outcome.store.manifests == {}


def test_a_run_that_does_not_get_ready_in_time_says_whom_it_waited_for():
    job = job_file(workers=2, timeouts={"ready_s": 10.0})
    never = ComputeOptions(build_s=1e6)
    outcome = Simulation(job, LeastSquares(), compute=never).run(60.0)
    assert (outcome.state, outcome.left_behind) == ("failed", [])
    late = "worker-0, worker-1 (building the model)"
    assert outcome.reason == f"not ready in time; waiting for {late}"


@pytest.mark.parametrize(
    ("stop", "key", "least", "most"),
    [
        ({"steps": 40}, "step", 40, 48),
        ({"samples": 320, "seconds": 99.0}, "samples", 320, 384),
        ({"epochs": 0.5, "steps": 999}, "data_epoch", 0.5, 0.5),
        ({"seconds": 2.0, "epochs": 99.0}, "step", 70, 90),
    ],
    ids=["steps", "samples", "epochs", "seconds"],
)
def test_a_run_ends_at_the_first_limit_that_it_reaches(stop, key, least, most):
    outcome = Simulation(job_file(workers=2, **stop), LeastSquares(), compute=STEADY).run()
    assert outcome.state == "finished"
    assert least <= outcome.store.run[key] <= most


# ---------------------------------------------------------------- poison


def test_a_gradient_that_is_not_finite_is_left_out_and_counted():
    problem = Poisoned({5, 77}, samples=128)
    outcome = Simulation(job_file(workers=2, epochs=4.0), problem).run()
    assert outcome.state == "finished"
    assert np.isfinite(outcome.weights).all()
    counted = sum(
        outcome.store.daemons[f"worker-{i}"]["metrics"]["nonfinite_steps"] for i in (0, 1)
    )
    assert counted == 8
    assert outcome.store.run["step"] == 4 * 16 - 8
    assert np.abs(outcome.weights - problem.solution).max() < 0.1


@pytest.mark.parametrize("push_every", [1, 3])
def test_a_portion_ends_even_if_its_last_batches_are_poison(push_every):
    class Last(LeastSquares):
        """Every fourth gradient of a worker is no number: the last one of each portion."""

        def gradient(self, w, batch):
            loss, gradient = super().gradient(w, batch)
            return (np.nan if batch.number % 4 == 3 else loss), gradient

    job = job_file(algorithm=("downpour", {"push_every_steps": push_every}), epochs=1.0)
    outcome = Simulation(job, Last(samples=128)).run(60.0)
    assert (outcome.state, outcome.store.run["step"]) == ("finished", 12)


def test_too_many_poisoned_steps_in_a_row_end_the_run_and_say_why():
    job = job_file(workers=2, nonfinite_steps_max=5, epochs=4.0)
    outcome = Simulation(job, Poisoned(set(range(256)))).run()
    assert (outcome.state, outcome.left_behind) == ("failed", [])
    assert (
        "the loss or its gradient was not finite or too large for 5 steps in a row"
        in outcome.reason
    )
    assert np.isfinite(outcome.weights).all()


# ---------------------------------------------------------------- compressors


@pytest.mark.per_commit(2)
@pytest.mark.parametrize("name", registry.names("compressors"))
def test_a_run_comes_near_its_minimum_with_every_compressor(name):
    fields = registry.load("compressors", name).Options.__dataclass_fields__
    options = {"density": 0.2} if "density" in fields else {}
    job = job_file(
        workers=2, servers=2, compression=(name, options), optimizer=("sgd", {"lr": 0.01}),
        epochs=8.0,
    )  # fmt: skip
    problem = LeastSquares(size=60)
    outcome = Simulation(job, problem, compute=STEADY).run()
    assert outcome.state == "finished"
    start = problem.evaluate(problem.initial())["loss"]
    assert problem.evaluate(outcome.weights)["loss"] <= 0.02 * start
