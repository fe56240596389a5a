"""Whole runs drawn from a seed: small, in bad circumstances, under all checkers.

A seed decides everything: the poor network, which faults strike whom and when, how long steps take.
The same seed of the same scenario is the same run to the last byte of its trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from guests import DAY_S, Guests
from liars import Liar, OthersChecker
from of_torch import OfTorch
from simulated import (
    ACCOUNT,
    FullAtDrain,
    FullAtEnd,
    FullAtRelease,
    KillAtCut,
    KillAtDecision,
    KillInCommit,
    ReplacedAtCut,
    SaveAtCut,
    StopAtWork,
    job_file,
    ledger_checkers,
)
from split_ledger import SplitChecker, SplitLedger
from stolen_key import Thief

from dlctl.job.config import Gradients, Host, Party
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import (
    AcksChecker,
    AnswersChecker,
    BasesChecker,
    Book,
    BufferedChecker,
    Checker,
    ClockChecker,
    DurableChecker,
    FetchesChecker,
    GlobalBook,
    GroupChecker,
    LeadChecker,
    LeasesChecker,
    LedgerChecker,
    LivenessChecker,
    NormChecker,
    NothingLeft,
    OwnStepsChecker,
    QuorumChecker,
    RecutChecker,
    SamplesChecker,
    SavedChecker,
    StreamChecker,
    TablesChecker,
    TermsChecker,
)
from dlctl.sim.crashpoints import PointCrash
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults, Moment
from dlctl.sim.loops import LoopOptions
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.objectives import LeastSquares, Ledger, StreamedLedger, TurnedLedger
from dlctl.sim.process import Process
from dlctl.sim.simulation import Simulation
from dlctl.sim.world import World
from dlctl.wire.messages import Array

# Methods from outside are installed here, for whoever replays a seed, too.
sys.path.insert(0, str(Path(__file__).parents[1] / "toys"))
WORKERS, SERVERS = 3, 2
HEAL_AT_S = 6.0
"""All faults are over then; a run without faults would end at half of it."""
LONG_HEAL_AT_S = 20.0
"""The same where somebody stands still for about as long as he is waited for."""
LIMIT_S = 100.0
"""A run that is not over by then is stuck."""
COMPUTE = ComputeOptions(step_s=0.1, spread=0.4, build_s=0.1)
TIMEOUTS = {"silent_s": 6.0, "resend_s": 0.3}


def poor_network(seed: int) -> NetworkOptions:
    """Anything from a good network to one that loses every tenth message; half of them tell when a
    connection has ended, as TCP does, and half do not.
    """
    rng = np.random.default_rng([seed, 1])
    loss, duplicate, reorder = (float(p) for p in rng.uniform(0, 0.1, 3))
    bandwidth = float(rng.choice([3e4, 3e5])) if rng.random() < 0.3 else None
    link = SimLink(
        latency_s=float(rng.uniform(0.0002, 0.02)), jitter_s=0.005, bytes_per_s=bandwidth,
        loss=loss, duplicate=duplicate, reorder=reorder,
    )  # fmt: skip
    tells = bool(np.random.default_rng([seed, 9]).random() < 1 / 2)
    return NetworkOptions(link=link, tells_of_breaks=tells)


def mixed_faults(seed: int) -> Faults:
    """Six to twenty faults that a run survives without recovery of servers and the control plane.

    Every fourth run has a bad start; the others have begun when it comes over them.
    """
    rng = np.random.default_rng([seed, 2])

    def up_to(most: int) -> int:
        return int(rng.integers(0, most + 1))

    return Faults(
        kills=1 + up_to(2), freezes=1 + up_to(2), control_freezes=up_to(1), cuts=1 + up_to(1),
        partitions=up_to(1), half_opens=up_to(2), resets=1 + up_to(2), full_disks=up_to(1),
        slow_disks=1, clock_jumps=1 + up_to(2), save_errors=0.1, freeze_s=1.2, cut_s=1.2,
        ghosts=up_to(1), partition_s=1.2, half_open_s=1.2,
        from_s=0.9 if seed % 4 else 0.0, heal_at_s=HEAL_AT_S,
    )  # fmt: skip


POINTS = (
    "block updated", "vector copied", "undo begun", "undo block written", "block scattered",
    "commit begun", "commit half written", "commit written", "record written",
)  # fmt: skip
"""Where a server may die within an update or a commit; see `dlctl.shards`."""


def recovery_faults(seed: int) -> Faults:
    """Deaths of servers, agents and the coordinator, some of them in the middle of a commit, with
    a poor network and dying workers about them.
    """
    rng = np.random.default_rng([seed, 3])

    def up_to(most: int) -> int:
        return int(rng.integers(0, most + 1))

    points = tuple(
        PointCrash(
            name=f"server-{up_to(SERVERS - 1)}", point=str(rng.choice(POINTS)), count=1 + up_to(30)
        )
        for _ in range(2)
    )
    # They start each other again; if both die at once, the run has to be started by hand.
    control = {"coordinator_kills" if rng.random() < 0.7 else "agent_kills": 1 + up_to(1)}
    return Faults(
        kills=up_to(1), server_kills=1 + up_to(1), **control, freezes=up_to(1), cuts=up_to(1),
        half_opens=up_to(1), resets=up_to(2), slow_disks=up_to(1),
        clock_jumps=up_to(1), points=points, freeze_s=1.2, cut_s=1.2, half_open_s=1.2, from_s=0.9,
        heal_at_s=HEAL_AT_S,
    )  # fmt: skip


def forgetting_faults(seed: int) -> Faults:
    """Coordinators that die while the disk is full, and others that find it full: what those before
    them have decided is not on record. Whoever they decide about dies, too.
    """
    rng = np.random.default_rng([seed, 4])

    def up_to(most: int) -> int:
        return int(rng.integers(0, most + 1))

    return Faults(
        forgotten=1 + up_to(1), full_disks=up_to(1), full_disk_s=4.0, coordinator_kills=up_to(1),
        kills=1 + up_to(2), server_kills=up_to(2), freezes=up_to(1), ghosts=up_to(1),
        cuts=up_to(1), resets=up_to(1), slow_disks=up_to(1), freeze_s=1.2, ghost_s=1.2, cut_s=1.2,
        from_s=0.9 if seed % 4 else 0.0, heal_at_s=HEAL_AT_S, tight_disks=up_to(1),
    )  # fmt: skip


def and_rare_faults(seed: int, faults: Faults, durability: str) -> Faults:
    """These, but on every fourth seed two or three stand still for about as long as they are waited
    for, instead of being killed before that; and on every sixth one everything dies at once, and
    the run is brought back, if what its servers have is kept.
    """
    rng = np.random.default_rng([seed, 8])
    if rng.random() < 1 / 4:
        faults = replace(
            faults, long_freezes=int(rng.integers(2, 4)), kills=0, server_kills=0, freezes=0,
            control_freezes=0, begin_until_s=faults.heal_at_s, heal_at_s=LONG_HEAL_AT_S,
        )  # fmt: skip
    if rng.random() < 1 / 6 and durability != "none":
        faults = replace(faults, recoveries=1)
    return faults


def syncing(seed: int, simulation: Simulation) -> Simulation:
    """The same on a disk whose syncs take no time, as on a good one, or as on a very slow one."""
    rng = np.random.default_rng([seed, 13])
    simulation.world.disk.commit_s = float(rng.choice([0.0, 0.004, 0.15]))
    return simulation


# ---------------------------------------------------------------- the ledger


def _ledger(
    seed: int,
    faults: Faults,
    *,
    epochs: int = 4,
    cells: int = 200,
    averages: bool = False,
    shares: bool = False,
    in_step: bool = True,
    forgets: bool = False,
    totals: bool = False,
    compute: ComputeOptions = COMPUTE,
    more: Callable[[Ledger], Checker] | None = None,
    durabilities: tuple[str, ...] = ("process", "process", "process", "disk", "none"),
    **options: object,
) -> Simulation:
    problem = Ledger(shards=SERVERS, cells=cells)
    durability = durabilities[seed % len(durabilities)]
    faults = and_rare_faults(seed, faults, durability)
    forgets |= bool(faults.full_disks and (faults.recoveries or faults.long_freezes))
    usual = {"portion_batches": 2, "checkpoint_s": 0.6, "evaluate_epochs": 1.0}
    usual |= {"epochs": float(epochs)} if epochs else {}
    job = job_file(
        WORKERS, SERVERS, optimizer=ACCOUNT, batch_size=4, seed=seed,
        restarts_max=20, durability=durability, timeouts=TIMEOUTS, **usual | options,
    )  # fmt: skip
    checkers = ledger_checkers(
        problem, epochs, once=False, averages=averages, shares=shares, in_step=in_step,
        forgets=forgets, totals=totals,
        heal_at_s=faults.heal_at_s,
    )  # fmt: skip
    checkers += (more(problem),) if more is not None else ()
    checkers += (BasesChecker(),) if durability == "disk" else ()
    # Behind the checkers of a method's own: these say more of what it does wrong.
    ahead = int(job.algorithm.options.get("overlap", False))
    checkers += (ClockChecker(ahead=ahead),) if averages and in_step else ()
    return syncing(seed, Simulation(
        job, problem, seed, network=poor_network(seed), compute=compute, faults=faults,
        checkers=checkers,
    ))  # fmt: skip


def downpour(seed: int) -> Simulation:
    """Dense pushes, each applied as it comes; every other seed pushes and fetches now and then."""
    now_and_then = {"fetch_every_steps": 3, "push_every_steps": 2}
    method = ({}, now_and_then, {"overlap": False}, {"warmstart_steps": 6})[seed % 4]
    return _ledger(seed, mixed_faults(seed), algorithm=("downpour", method))


def downpour_topk(seed: int) -> Simulation:
    """Of two gradients one travels at once; the other one must not get lost in the worker. What
    comes back is mostly what has changed, on some seeds in 16 bits, which counts fit into; half of
    the workers change their own parameters, too.
    """
    method = {
        "push_every_steps": 2, "fetch_every_steps": 1 + seed % 2,
        "inner_lr": (0.01, 0.0)[seed // 2 % 2],
    }  # fmt: skip
    return _ledger(
        seed,
        mixed_faults(seed),
        epochs=6,
        compression=("topk", {"density": 0.005}),
        algorithm=("downpour", method),
        fetch_values=("float32", "float16", "bfloat16")[seed // 4 % 3],
    )


CLIPPED = Gradients(clip="global", clip_norm=1e9)
"""All shards have to know of each other what they are about to apply, and all of it is applied."""


def sync(seed: int) -> Simulation:
    """A barrier in the servers; in every other run they clip together."""
    gradient = CLIPPED if seed % 2 else Gradients()
    return _ledger(
        seed, mixed_faults(seed), averages=True, shares=True, algorithm=("sync", {}),
        gradient=gradient, more=lambda _: NormChecker(),
    )  # fmt: skip


def backups(seed: int) -> Simulation:
    """A barrier that waits for all gradients but one, of which every second run loses servers."""
    faults = recovery_faults(seed) if seed % 2 else mixed_faults(seed)
    return _ledger(
        seed, faults, averages=True, shares=True, durabilities=("process", "process", "disk"),
        algorithm=("sync", {"backup_workers": 1}),
    )  # fmt: skip


def target_batch(seed: int) -> Simulation:
    """Steps of many gradients of whoever takes part, some of them so slow that the deadline passes;
    two of three runs also lose servers and coordinators.
    """
    faults = recovery_faults(seed) if seed % 3 else mixed_faults(seed)
    method = {"target_samples": (8, 24, 64)[seed // 2 % 3], "deadline_s": (0.15, 5.0)[seed % 2]}
    return _ledger(
        seed, faults, averages=True, shares=True, durabilities=("process", "process", "disk"),
        algorithm=("target-batch", method),
    )  # fmt: skip


ACCOUNTS = 6


def stale_gradients(seed: int) -> Simulation:
    """Gradients of several batches, which a slow worker stops when they have become too old; in
    every other run no worker dies, and no sample may be missing.
    """
    faults = mixed_faults(seed)
    if seed % 2 == 0:
        faults = Faults(server_kills=1, resets=2, heal_at_s=HEAL_AT_S)
    method = ("ringmaster", "ringmaster-lmo")[seed // 2 % 2]
    return _ledger(
        seed, faults, epochs=8, cells=400, durabilities=("process", "process", "disk"),
        algorithm=(method, {"delay_max": 3}), gradient=Gradients(accumulate=2), totals=True,
        compute=replace(COMPUTE, slow={WORKERS - 1: 8.0}),
    )  # fmt: skip


def recuts(seed: int) -> Simulation:
    """The model is cut anew every other step or so while everything may die, servers in the middle
    of it above all. A server has whole accounts, or none.
    """
    servers, problem = 3, TurnedLedger(shards=ACCOUNTS, cells=200)
    durability = ("process", "process", "disk")[seed % 3]
    faults = recovery_faults(seed) if seed % 4 else mixed_faults(seed)
    faults = and_rare_faults(seed, faults, durability)
    method = {"target_samples": (8, 24)[seed // 2 % 2], "deadline_s": (0.3, 5.0)[seed % 2]}
    job = job_file(
        WORKERS, servers, optimizer=ACCOUNT, batch_size=4, seed=seed, restarts_max=20,
        durability=durability, timeouts=TIMEOUTS, portion_batches=2, epochs=6.0,
        checkpoint_s=0.0 if seed % 5 else 0.6, evaluate_epochs=1.0,
        algorithm=("target-batch", method),
    )  # fmt: skip
    often = replace(job.servers, layout="bandwidth", recut_s=0.3)
    book = GlobalBook(problem)
    forgets = bool(faults.full_disks and (faults.recoveries or faults.long_freezes))
    simulation = Simulation(
        replace(job, servers=often), problem, seed,
        network=replace(poor_network(seed), free_ports=seed % 2 > 0), compute=COMPUTE,
        faults=faults,
        checkers=(
            book, RecutChecker(book), TermsChecker(),
            SamplesChecker(problem.samples, 6, once=False),
            LeasesChecker(problem.samples, 6, forgets=forgets), FetchesChecker(),
            LivenessChecker(faults.heal_at_s), NothingLeft(),
        ),
    )  # fmt: skip
    wants_cuts(simulation.world, np.random.default_rng([seed, 17]), servers)
    if seed % 4 == 1:
        KillAtCut(simulation, np.random.default_rng([seed, 18]), faults.heal_at_s)
    if seed % 4 == 3:
        SaveAtCut(simulation)
    if seed % 4 == 2:
        ReplacedAtCut(simulation, np.random.default_rng([seed, 19]), faults.heal_at_s)
    return syncing(seed, simulation)


def wants_cuts(world: World, rng: np.random.Generator, servers: int) -> None:
    """Whenever a cut is possible, another one is better, whatever the bandwidths are."""
    honest = world.start

    def start(past: Past, incarnation: int = 1) -> Process:
        process = honest(past, incarnation)
        recutting = process.machine.recutting  # type: ignore[attr-defined]

        def wanted() -> tuple[tuple[int, ...], float]:
            size = recutting.registration.layout.size()
            inner = sorted(int(at) for at in rng.integers(0, ACCOUNTS + 1, servers - 1))
            return (0, *(at * size // ACCOUNTS for at in inner), size), 0.5

        recutting.wanted = wanted
        return process

    world.start = start  # type: ignore[method-assign]


def local_sgd(seed: int) -> Simulation:
    """Replicas that go some steps alone between two barriers, with dense and with sparse pushes;
    every third also loses servers.
    """
    faults = recovery_faults(seed) if seed % 3 == 0 else mixed_faults(seed)
    method = {"local_steps": 2 + seed % 2, "inner_lr": 1.0, "overlap": seed % 4 < 2}
    compression = (("none", {}), ("topk", {"density": 0.005}))[seed // 5 % 2]
    return _ledger(
        seed, faults, averages=True, durabilities=("process", "process", "disk"),
        algorithm=("local-sgd", method), compression=compression, more=OwnStepsChecker,
    )  # fmt: skip


WAYS: tuple[tuple[str, dict[str, Any], dict[str, bool]], ...] = (
    ("async-diloco", {"local_steps": 3}, {"in_step": False}),
    ("sparseloco", {"local_steps": 2, "clip": False}, {"averages": True}),
    ("loscar", {"local_steps": 2, "density": 1.0, "overlap": True}, {"averages": True}),
    (
        "streaming-diloco",
        {"local_steps": 4, "fragments": 2, "delay_steps": 0, "mix": 0.0},
        {"averages": True, "in_step": False},
    ),
    (
        "decoupled-diloco",
        {
            "local_steps": 4,
            "fragments": 2,
            "delay_steps": 0,
            "mix": 0.0,
            "merge": "mean",
            "quorum": 2,
            "grace_s": 0.05,
        },
        {"averages": True, "in_step": False},
    ),
)
"""(method, options, what its ledger is like) of those whose replicas go ways of their own."""


def ways(seed: int) -> Simulation:
    """The relatives of local SGD; two of three seeds also lose servers and coordinators."""
    name, options, kind = WAYS[seed % len(WAYS)]
    faults = mixed_faults(seed) if seed // 3 % 3 == 0 else recovery_faults(seed)
    return _ledger(
        seed, faults, durabilities=("process", "process", "disk"),
        algorithm=(name, {**options, "inner_lr": 1.0}), **kind,
    )  # fmt: skip


def recovery(seed: int) -> Simulation:
    """Servers, agents and the coordinator die as well, and come back with what they knew."""
    method = ("downpour", {"push_every_steps": 1 + seed % 2})
    compression = (("none", {}), ("topk", {"density": 0.005}))[seed // 2 % 2]
    return _ledger(
        seed, recovery_faults(seed), epochs=6, durabilities=("process", "process", "disk"),
        algorithm=method, compression=compression,
    )  # fmt: skip


def commits(seed: int) -> Simulation:
    """On a disk whose syncs take long enough for many pushes: servers die while commits are under
    way, and everything at once on every sixth seed.
    """
    name, method, compression = (
        ("downpour", {}, "none"),
        ("downpour", {"push_every_steps": 2, "fetch_every_steps": 1}, "topk"),
        ("sync", {}, "none"),
        ("local-sgd", {"local_steps": 2, "inner_lr": 1.0}, "none"),
    )[seed % 4]  # fmt: skip
    faults = recovery_faults(seed) if seed % 2 else mixed_faults(seed)
    simulation = _ledger(
        seed, faults, averages=name != "downpour", shares=name == "sync", durabilities=("disk",),
        algorithm=(name, method), more=lambda _: DurableChecker(),
        compression=(compression, {"density": 0.005} if compression == "topk" else {}),
    )  # fmt: skip
    rng = np.random.default_rng([seed, 14])
    sync_s = simulation.world.disk.commit_s = float(rng.choice([0.01, 0.05, 0.25]))
    for _ in range(2):
        name = f"server-{rng.integers(SERVERS)}"
        after_s = float(rng.uniform(0.0, sync_s))
        KillInCommit(simulation, name, int(rng.integers(5, 40)), after_s)
    return simulation


def sync_recovery(seed: int) -> Simulation:
    """The same with a barrier, whose held pushes die with their server; in every other run all
    servers clip together.
    """
    return _ledger(
        seed, recovery_faults(seed), averages=True, shares=True,
        durabilities=("process", "process", "disk"), algorithm=("sync", {}),
        gradient=CLIPPED if seed % 2 else Gradients(), more=lambda _: NormChecker(),
    )  # fmt: skip


def full_disks(seed: int) -> Simulation:
    """The coordinator's notes are older than what its agents, workers and servers know; of every
    third run, already when the workers begin, of every third one when all is done, and of every
    sixth one when they are told to drain.
    """
    method = (
        ("downpour", {"push_every_steps": 1 + seed // 2 % 2}),
        ("local-sgd", {"local_steps": 2, "inner_lr": 1.0}),
        ("downpour", {"warmstart_steps": 6}), ("sync", {}),
    )[seed % 4]  # fmt: skip
    simulation = _ledger(
        seed, forgetting_faults(seed), forgets=True, averages=method[0] != "downpour",
        shares=method[0] == "sync", durabilities=("process", "process", "disk"), algorithm=method,
        gradient=CLIPPED if method[0] == "sync" else Gradients(),
    )  # fmt: skip
    moment = seed // 3 % 3
    if moment == 1:
        rng = np.random.default_rng([seed, 5])
        deaths = [(float(rng.uniform(0.1, 2.0)), name) for name in (COORDINATOR, "worker-1")]
        FullAtRelease(simulation, 4.0, *deaths)
    elif moment == 2:
        rng = np.random.default_rng([seed, 6])
        FullAtEnd(simulation, 3.0, (float(rng.uniform(0.0, 2.5)), COORDINATOR))
    elif seed % 2:
        rng = np.random.default_rng([seed, 10])
        FullAtDrain(simulation, 3.0, (float(rng.uniform(0.0, 1.0)), COORDINATOR))
    return simulation


def stops(seed: int) -> Simulation:
    """Stopped in the middle of anything, on most seeds with less patience than a step takes: what
    was acknowledged has to be in the last checkpoint. Half of them have no other one, and portions
    so long that the stop comes before the first of them is done.
    """
    rng = np.random.default_rng([seed, 7])
    method = (
        ("downpour", {}),
        ("local-sgd", {"local_steps": 2, "inner_lr": 1.0, "overlap": seed % 8 < 4}),
        ("downpour", {"push_every_steps": 2}), ("sync", {}),
    )[seed % 4]  # fmt: skip
    is_first = seed // 8 % 2 == 0
    portions = {"portion_batches": 16, "checkpoint_s": 0.0} if is_first else {}
    faults = (recovery_faults, mixed_faults, forgetting_faults)[seed % 3](seed)
    if seed % 3 == 0 and is_first:  # A server that has been saved dies while others are.
        faults = replace(faults, moments=(Moment(name="server-0", kind="Saved"),))
    simulation = _ledger(
        seed, faults, epochs=100, cells=400, averages=method[0] != "downpour",
        shares=method[0] == "sync", durabilities=("process", "process", "disk"), algorithm=method,
        forgets=seed % 3 == 2, **portions,
    )  # fmt: skip
    grace_s = float(rng.choice([0.0, 0.05, 0.3, 5.0]))
    StopAtWork(simulation, float(rng.uniform(0.0, 1.0 if is_first else 4.0)), grace_s)
    return simulation


# ---------------------------------------------------------------- a method with one right result


class SameResult(Checker):
    """The weights are those of an undisturbed run, however often a portion had to be repeated."""

    def __init__(self, expected: Array) -> None:
        self.expected = expected

    def at_end(self, world) -> None:
        if world.store.run.get("state") != "finished":
            return  # It may have found no room when it began.
        difference = float(np.abs(world.weights() - self.expected).max())
        if not difference <= 1e-6:
            raise self.broken(f"the weights are {difference:.3g} away from an undisturbed run's")


def split(seed: int) -> Simulation:
    """Clients and a head: in turn, or all at once with one h or with one for each, and averages
    after a batch or several; all die.
    """
    rng = np.random.default_rng([seed, 14])
    options = (
        {}, {"clients": "parallel"}, {"clients": "parallel", "heads": "each"}, {"shape": "u"},
        {"shape": "u", "clients": "parallel", "heads": "each"},
        {"clients": "parallel", "heads": "each", "local_steps": 3},
        {"shape": "u", "clients": "parallel", "local_steps": 2},
    )[seed % 7]  # fmt: skip
    portion_batches = 4 if "local_steps" in options else 2
    problem = SplitLedger(64, portion_batches, batch_size=4, epochs=3)
    problem.is_u = options.get("shape") == "u"
    problem.is_in_turn = "clients" not in options
    problem.evaluates = seed % 2 > 0
    faults = recovery_faults(seed) if rng.random() < 1 / 2 else mixed_faults(seed)
    moments = tuple(
        Moment(name=f"worker-{rng.integers(WORKERS)}", kind="PeerReply", direction="received",
               count=int(rng.integers(1, 12)))
        for _ in range(2)
    )  # fmt: skip
    of_head = Moment(name=f"worker-{WORKERS}", kind="PeerReply", before=True, count=6)
    moments += (of_head,) if rng.random() < 1 / 3 else ()
    of_drain = Moment(name=f"worker-{WORKERS}", kind="Drain", direction="received")
    moments += (of_drain,) if seed % 4 == 1 else ()
    faults = replace(faults, moments=moments, full_disks=0)
    durability = ("process", "process", "disk")[seed % 3]
    job = job_file(
        WORKERS + 1, 2, algorithm=("split", options), optimizer=ACCOUNT, batch_size=4,
        inner=("sgd", {"lr": 1.0}) if "local_steps" in options else None,
        portion_batches=portion_batches, seed=seed, restarts_max=20, durability=durability,
        timeouts=TIMEOUTS, epochs=3.0, checkpoint_s=0.6, evaluate_epochs=1.0, parties=(
            Party(name="clinic", role="client", task="a", host="local", workers=WORKERS),
            Party(name="lab", role="head", task="b", host="local"),
        ),
    )  # fmt: skip
    checkers = (
        SplitChecker(problem, options.get("heads", "one")), TermsChecker(),
        LeasesChecker(problem.samples, 3), LivenessChecker(faults.heal_at_s), NothingLeft(),
    )  # fmt: skip
    return syncing(seed, Simulation(
        job, problem, seed, network=poor_network(seed), compute=COMPUTE, faults=faults,
        checkers=checkers,
    ))  # fmt: skip


def _driven(seed: int, checkers: tuple[Checker, ...], **circumstances: object) -> Simulation:
    job = job_file(
        WORKERS, SERVERS, algorithm=("sandblaster", {"iterations": 5, "gradient_norm_min": 0.0}),
        batch_size=8, portion_batches=1, checkpoint_s=0.6, restarts_max=20, timeouts=TIMEOUTS,
        durability=("process", "process", "disk")[seed % 3],
    )  # fmt: skip
    problem = LeastSquares(samples=64)
    return syncing(
        seed, Simulation(job, problem, seed, compute=COMPUTE, checkers=checkers, **circumstances)
    )


@cache
def _undisturbed() -> Array:
    return _driven(0, ()).run().weights


def sandblaster(seed: int) -> Simulation:
    """Driven by the coordinator: each batch needs every portion exactly once, and each operation is
    made once on every shard, whoever dies.
    """
    faults = (mixed_faults, recovery_faults, recovery_faults, forgetting_faults)[seed % 4](seed)
    checkers = (
        TermsChecker(), LeasesChecker(
            64, forgets=bool(faults.full_disks or faults.forgotten), copies=1
        ),
        LivenessChecker(HEAL_AT_S), NothingLeft(), SameResult(_undisturbed()),
    )  # fmt: skip
    return _driven(seed, checkers, network=poor_network(seed), faults=faults)


def toys(seed: int) -> Simulation:
    """Methods from outside, each with a need of its own: a clock of the servers', a second table,
    other replicas and no servers, a group, a buffer; every sixth time one decider, which takes its
    time in every third run of these, and in every twelfth run an engine.
    """
    name = ("toy-clock", "toy-table", "toy-ring", "toy-group", "toy-buffer")[seed % 5]
    options = {}
    if seed % 6 == 5:
        name, options = "toy-quorum", {"backups": 1, "rest_s": 0.2 * (seed // 6 % 3 == 1)}
    elif seed % 12 == 7:
        name = "toy-engine"
    servers = 0 if name in ("toy-ring", "toy-group") else SERVERS
    faults = recovery_faults(seed) if servers and seed // 5 % 2 else mixed_faults(seed)
    if not servers:
        faults = replace(faults, save_errors=0.0, full_disks=0, slow_disks=0)
    problem, epochs = LeastSquares(samples=128), 4
    job = job_file(
        WORKERS, servers, algorithm=(name, options), batch_size=4, portion_batches=2, seed=seed,
        epochs=float(epochs), restarts_max=20, timeouts=TIMEOUTS, checkpoint_s=0.6,
        durability=("process", "disk")[seed // 4 % 2],
        gradient=CLIPPED if name == "toy-quorum" and seed % 24 == 23 else Gradients(),
    )  # fmt: skip
    checkers = (
        TermsChecker(), SamplesChecker(problem.samples, epochs, once=False),
        LeasesChecker(problem.samples, epochs, forgets=bool(faults.full_disks)),
        FetchesChecker(), TablesChecker(), AnswersChecker(), LivenessChecker(HEAL_AT_S),
        NothingLeft(), GroupChecker(),
    )  # fmt: skip
    if name == "toy-clock" and not faults.full_disks:
        checkers = (*checkers, LeadChecker())
    if name == "toy-quorum":
        checkers = (*checkers, QuorumChecker(options["rest_s"]), NormChecker())
    if name == "toy-buffer":
        checkers = (*checkers, BufferedChecker())
    simulation = Simulation(
        job, problem, seed, network=poor_network(seed), compute=COMPUTE, faults=faults,
        checkers=checkers,
    )  # fmt: skip
    syncing(seed, simulation)
    simulation.world.groups.torn = 0.1
    if name == "toy-quorum" and seed % 4 == 1:
        KillAtDecision(simulation, 2 + seed % 3, f"server-{seed // 12 % SERVERS}")
    return simulation


def serverless(seed: int) -> Simulation:
    """Replicas that sum with each other, average in pairs, or have one model."""
    name = ("allreduce", ("gossip", "noloco")[seed // 2 % 2])[seed % 2]
    name = "hogwild" if seed % 5 == 4 else name
    name = "kfac" if seed % 10 == 8 else name
    mode = ("symmetric", "pull", "push")[seed // 2 % 3]
    faults = replace(mixed_faults(seed), save_errors=0.0, full_disks=0, slow_disks=0)
    hook = ("none", "powersgd", "post-local-sgd", "bf16")[seed // 2 % 4]
    sums = {"hook": hook, "powersgd_after_steps": 10, "local_after_steps": 10}
    contacts = {"gossip": {"mode": mode}, "noloco": {"local_steps": 3}, "hogwild": {}}
    factors = {"placement": ("opt", "lw")[seed // 10 % 2], "factor_steps": 2, "eigen_steps": 4}
    options = {"allreduce": sums, "kfac": factors, **contacts}[name]
    problem, epochs = LeastSquares(samples=128, size=144), 4
    problem.layout = Layout((TensorEntry("w", TRAINED, (12, 12), "float32"),))
    job = job_file(
        WORKERS, 0, algorithm=(name, options), batch_size=4,
        portion_batches=2, seed=seed, epochs=float(epochs), restarts_max=20, timeouts=TIMEOUTS,
        checkpoint_s=0.6, evaluate_epochs=1.0,
        inner=("sgd" if name == "hogwild" else "adamw", {"lr": 0.05}),
    )  # fmt: skip
    checkers = (
        TermsChecker(), SamplesChecker(problem.samples, epochs, once=False),
        LeasesChecker(problem.samples, epochs), AnswersChecker(), LivenessChecker(HEAL_AT_S),
        NothingLeft(), GroupChecker(),
    )  # fmt: skip
    simulation = Simulation(
        job, problem, seed, network=poor_network(seed), compute=COMPUTE, faults=faults,
        checkers=checkers, inner=lambda choice: partial(OfTorch, choice),
    )  # fmt: skip
    simulation.world.groups.torn = 0.1
    return simulation


def streams(seed: int) -> Simulation:
    """A dataset of unknown length: what is done is on record by shards and their offsets; all are
    read twice or three times, and every third run loses servers and its coordinator, too.
    """
    lengths, epochs = ((50, 23, 32), (100,), (8, 16, 0, 61, 7))[seed % 3], 2 + seed % 2
    faults = recovery_faults(seed) if seed % 3 == 2 else mixed_faults(seed)
    durability = ("process", "disk")[seed // 3 % 2]
    faults = and_rare_faults(seed, faults, durability)
    method = ({}, {"push_every_steps": 5, "fetch_every_steps": 2})[seed // 2 % 2]
    job = job_file(
        WORKERS, SERVERS, algorithm=("downpour", method), optimizer=ACCOUNT, batch_size=4,
        portion_batches=2, seed=seed, samples=epochs * sum(lengths), restarts_max=20,
        durability=durability, timeouts=TIMEOUTS, checkpoint_s=0.6,
    )  # fmt: skip
    problem = StreamedLedger(shards=SERVERS, cells=400, lengths=lengths)
    book = Book(problem)
    forgets = bool(faults.full_disks and (faults.recoveries or faults.long_freezes))
    checkers = (
        book, LedgerChecker(book), AcksChecker(book), TermsChecker(), FetchesChecker(),
        StreamChecker(lengths, 4, epochs), LeasesChecker(0, forgets=forgets),
        LivenessChecker(faults.heal_at_s), SavedChecker(book), NothingLeft(),
    )  # fmt: skip
    return syncing(seed, Simulation(
        job, problem, seed, network=poor_network(seed), compute=COMPUTE, faults=faults,
        checkers=checkers,
    ))  # fmt: skip


LIED_TO: tuple[tuple[str, dict[str, Any], dict[str, bool]], ...] = (
    ("downpour", {}, {}),
    ("ssp", {"staleness": 2}, {}),
    ("sync", {}, {"averages": True}),
    ("local-sgd", {"local_steps": 2, "inner_lr": 1.0}, {"averages": True}),
    WAYS[0],
)
"""(method, options, what its ledger is like)"""


def stolen_keys(seed: int) -> Simulation:
    """One of three workers is in somebody else's hands for a while. Servers and the coordinator die
    afterwards, so that each has to read what it has persisted of that.
    """
    name, options, kind = LIED_TO[seed % len(LIED_TO)]
    is_streamed = seed % 10 == 5
    rng = np.random.default_rng([seed, 12])
    faults = Faults(
        server_kills=1 + int(rng.integers(2)), coordinator_kills=int(rng.integers(2)),
        from_s=2.5, heal_at_s=HEAL_AT_S,
    )  # fmt: skip
    lengths = (50, 23, 32)
    problem = Ledger(shards=SERVERS, cells=300)
    stop: dict[str, Any] = {"epochs": 4.0}
    if is_streamed:
        problem = StreamedLedger(shards=SERVERS, cells=400, lengths=lengths)
        stop = {"samples": 4 * sum(lengths)}
    job = job_file(
        WORKERS, SERVERS, algorithm=(name, options), optimizer=ACCOUNT, batch_size=4, seed=seed,
        portion_batches=2, checkpoint_s=0.6, restarts_max=20, timeouts=TIMEOUTS,
        durability=("process", "disk")[seed // 5 % 2], **stop,
    )  # fmt: skip
    book = Book(problem)
    averages = kind.get("averages", False)
    checkers = (
        book, LedgerChecker(book, averages=averages), AcksChecker(book), TermsChecker(),
        FetchesChecker(), LivenessChecker(HEAL_AT_S), NothingLeft(),
    )  # fmt: skip
    simulation = Simulation(job, problem, seed, compute=COMPUTE, faults=faults, checkers=checkers)
    Thief(simulation, seed, book, from_s=float(rng.uniform(0.8, 1.2)), until_s=HEAL_AT_S - 1.0)
    return simulation


def liars(seed: int) -> Simulation:
    """One of three workers says what it likes: whatever its key allows, and all methods alike."""
    name, servers = (
        ("downpour", SERVERS), ("allreduce", 0), ("sync", SERVERS), ("gossip", 0),
        ("downpour", SERVERS),
    )[seed % 5]  # fmt: skip
    is_stream = seed % 5 == 4
    problem = (
        StreamedLedger(shards=SERVERS, cells=200, lengths=(50, 23))
        if is_stream
        else LeastSquares(samples=128)
    )
    job = job_file(
        WORKERS, servers, algorithm=(name, {}), optimizer=ACCOUNT, batch_size=4, portion_batches=2,
        seed=seed, seconds=5.0, timeouts=TIMEOUTS | {"grace_s": 4.0}, checkpoint_s=0.6,
        evaluate_epochs=0.0 if is_stream else 1.0,
        inner=None if servers else ("sgd", {"lr": 0.05}),
    )  # fmt: skip
    liar = f"worker-{1 + seed % 2}"
    faults = Faults(resets=1, clock_jumps=2, slow_disks=1, from_s=0.9, heal_at_s=HEAL_AT_S)
    checkers = (
        TermsChecker(), LivenessChecker(HEAL_AT_S), OthersChecker(liar), GroupChecker(),
        NothingLeft(),
    )  # fmt: skip
    simulation = Simulation(
        job, problem, seed, network=poor_network(seed), compute=COMPUTE, faults=faults,
        checkers=checkers,
    )  # fmt: skip
    Liar(simulation, liar, seed)
    return simulation


LOOPED: tuple[tuple[str, dict[str, Any], dict[str, bool]], ...] = (
    ("local-sgd", {"local_steps": 3, "inner_lr": 1.0}, {"averages": True}),
    ("downpour", {}, {}),
    ("sync", {}, {"averages": True, "shares": True}),
    (
        "local-sgd",
        {"local_steps": 7, "overlap": True, "inner_lr": 1.0},
        {"averages": True, "in_step": False},
    ),
    ("sparseloco", {"local_steps": 2, "clip": False, "inner_lr": 1.0}, {"averages": True}),
    ("async-diloco", {"local_steps": 4, "inner_lr": 1.0}, {"in_step": False}),
    ("ssp", {}, {}),
)


def loops(seed: int) -> Simulation:
    """Training loops of the user's own, as their authors have written them: with batches of any
    size and groups of them, steps that are skipped, data of their own.
    """
    dice = np.random.default_rng([seed, 14])
    name, options, checks = LOOPED[seed % len(LOOPED)]
    faults = recovery_faults(seed) if dice.random() < 1 / 3 else mixed_faults(seed)
    loop = LoopOptions(
        batch_size=int(dice.integers(1, 11)), accumulate=int(dice.choice([1, 1, 2, 3])),
        ahead=int(dice.integers(0, 5)), skips=float(dice.choice([0.0, 0.0, 0.1])),
        own_samples=int(dice.choice([0, 0, 0, 5])), lr=options.get("inner_lr", 0.01),
    )  # fmt: skip
    stop = {"samples": 256, "epochs": 0} if loop.own_samples else {}
    simulation = _ledger(
        seed, faults, algorithm=(name, options), has_loop=True,
        durabilities=("process", "process", "disk"), cells=400, **checks | stop,
    )  # fmt: skip
    simulation.world.compute = replace(COMPUTE, loop=loop)
    return simulation


JOINED: tuple[tuple[str, dict[str, Any], dict[str, bool]], ...] = (
    ("downpour", {}, {}),
    ("local-sgd", {"local_steps": 2, "inner_lr": 1.0}, {"averages": True}),
    ("sync", {}, {"averages": True, "shares": True}),
    ("async-diloco", {"local_steps": 3, "inner_lr": 1.0}, {"in_step": False}),
    ("downpour", {"push_every_steps": 2}, {}),
    ("ssp", {"staleness": 2}, {}),
)


def joins(seed: int) -> Simulation:
    """Guests beside the run's own workers: they join, crash, vanish, stand still, return, leave and
    are revoked, in a run with one slot less than guests. Every third run trains with four workers
    only, and waits for guests.
    """
    name, options, kind = JOINED[seed % len(JOINED)]
    dice = np.random.default_rng([seed, 15])
    faults = recovery_faults(seed) if dice.random() < 1 / 3 else mixed_faults(seed)
    simulation = _ledger(
        seed, faults, algorithm=(name, options), epochs=6, cells=400,
        durabilities=("process", "process", "disk"), has_loop=bool(dice.random() < 1 / 4),
        workers_max=WORKERS + 2, workers_min=WORKERS + 1 if seed % 3 == 2 else None, **kind,
    )  # fmt: skip
    heal_at_s = faults.heal_at_s

    def when(first: float = 0.0) -> float:
        return float(dice.uniform(first, heal_at_s - 1.0))

    guests = Guests(simulation)
    names = ("alice", "bob", "carol")
    for each in names:
        invited_s = float(dice.uniform(0.0, 2.0))
        # Longer than the clock may jump: a run that waits for them would wait for ever.
        guests.invite(invited_s, each, lasts_s=7 * DAY_S)
        guests.join(invited_s + 0.1, each)
        for _ in range(3):
            strike = dice.choice([guests.kill, guests.vanish, guests.freeze, guests.stop])
            strike(when(1.0), each)
            guests.join(when(1.5), each)
        guests.kill(when(1.0), each, "worker")
        guests.join(heal_at_s + 0.5, each)  # Somebody is there in the end.
    guests.revoke(when(2.0), "carol")
    guests.join(heal_at_s / 2, "bob", twice=True)
    return simulation


def preempted(seed: int) -> Simulation:
    """Workers on hosts of a batch system that are queued, given, and taken back with a notice or
    without, beside servers that stay; now and then the coordinator dies meanwhile.
    """
    name, options, kind = JOINED[seed % len(JOINED)]
    dice = np.random.default_rng([seed, 16])
    of_workers = tuple(Host(ssh=f"h{n}", servers=0, workers=1) for n in range(WORKERS))
    faults = Faults(
        kills=int(dice.integers(0, 2)), coordinator_kills=int(dice.random() < 1 / 3), resets=2,
        clock_jumps=1, from_s=0.9, heal_at_s=HEAL_AT_S,
    )  # fmt: skip
    simulation = _ledger(
        seed, faults, algorithm=(name, options), epochs=6, durabilities=("process", "disk"),
        hosts=(Host(servers=SERVERS, workers=0), *of_workers), workers_min=1, **kind,
    )  # fmt: skip
    batch = simulation.world.batch
    for n in range(1, WORKERS + 1):
        agent = f"agent-{n}"
        if n > 1 and dice.random() < 1 / 2:
            batch.queue(agent)
            simulation.at(float(dice.uniform(0.0, 2.0)), partial(batch.give, agent))
        when_s = float(dice.uniform(1.0, 2.5))
        while when_s < HEAL_AT_S - 1.0:
            notice_s = float(dice.choice([0.0, 0.0, 0.3, 1.5]))
            if notice_s:
                simulation.at(when_s - min(notice_s, 0.9), partial(batch.notify, agent))
            simulation.at(when_s, partial(batch.take, agent))
            when_s += float(dice.uniform(0.1, 2.0))
            simulation.at(when_s, partial(batch.give, agent))
            when_s += float(dice.uniform(0.5, 3.0))
    return simulation


SCENARIOS: dict[str, Callable[[int], Simulation]] = {
    "downpour": downpour,
    "downpour-topk": downpour_topk,
    "sync": sync,
    "backups": backups,
    "target-batch": target_batch,
    "stale-gradients": stale_gradients,
    "recuts": recuts,
    "local-sgd": local_sgd,
    "ways": ways,
    "sandblaster": sandblaster,
    "recovery": recovery,
    "commits": commits,
    "sync-recovery": sync_recovery,
    "full-disks": full_disks,
    "stops": stops,
    "toys": toys,
    "serverless": serverless,
    "streams": streams,
    "stolen-keys": stolen_keys,
    "liars": liars,
    "loops": loops,
    "joins": joins,
    "split": split,
    "preempted": preempted,
}
"""Name -> seed -> a run that has not begun."""
