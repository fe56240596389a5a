"""A worker that says what it likes: messages that its key allows, with names and numbers that are
right or nearly right. The run goes on, and no other worker loses its process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.checkers import Checker
from dlctl.sim.simulation import Simulation
from dlctl.sim.world import World
from dlctl.wire import messages as m

NUMBERS = (0, 1, 2, 7, 64, 10**6, m.NATURAL_MAX)
EVERY_S, TIMES = 0.2, 50
"""Between two lies, once the run trains; and at most so many of them."""


class Liar:
    """What one worker's process says beside its work, of one kind in each run."""

    def __init__(self, simulation: Simulation, name: str, seed: int) -> None:
        self.world: World = simulation.world
        self.name = name
        self.rng = np.random.default_rng([seed, 11])
        kinds = [method for key, method in vars(Liar).items() if key.startswith("say_")]
        self.say: Callable[[Liar, tuple[int, int]], m.Message] = kinds[seed % len(kinds)]
        for number in range(TIMES):
            simulation.at(EVERY_S * (1 + number), self.lie)

    def lie(self) -> None:
        if self.coordinator.run.released_at is None:
            return
        process = self.world.process(self.name)
        identity = getattr(getattr(process.machine, "joining", None), "identity", None)
        if process.alive and identity is not None:
            message = self.say(self, (identity.slot, identity.term))
            self.world.network.send(process, COORDINATOR, message)

    def any(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    @property
    def number(self) -> int:
        return int(self.any(NUMBERS))

    @property
    def coordinator(self) -> Any:
        return self.world.machine(COORDINATOR)

    def portion(self) -> tuple[int, int]:
        """Often one that is leased, to whomever."""
        leased = sorted(self.coordinator.data.pool.holders.leased)
        is_known = leased and self.rng.random() < 3 / 4
        return self.any(leased) if is_known else (self.number, self.number)

    # ------------------------------------------------------------ the lies

    def say_that_it_has_failed(self, me: tuple[int, int]) -> m.Message:
        error = self.any(("", "made up", "task.loss raised E (train.py:1)"))
        return m.Failed(self.name, error, "", bool(self.rng.random() < 3 / 4))

    def say_that_a_sample_has_failed(self, me: tuple[int, int]) -> m.Message:
        data_epoch, portion = self.portion()
        return m.SampleFailed(*me, data_epoch, self.number, "made up", "", portion)

    def say_that_it_has_another_model(self, me: tuple[int, int]) -> m.Message:
        other = Layout((TensorEntry("w", TRAINED, (3,), "float32"),)).to_bytes()
        layout = self.coordinator.registration.layout.to_bytes()
        layout = self.any((layout, layout, other, b"[[", b"[]"))
        samples = self.any((self.coordinator.data.dataset.samples, self.number))
        return m.ModelReady(self.name, layout, samples, order=self.any(("", "another")))

    def say_that_it_does_anything(self, me: tuple[int, int]) -> m.Message:
        phase = self.any(("evaluating", "saving", "no room for its state", "x" * 1000))
        metrics: Any = {
            "stuck_s": self.number, "hangs": self.any((True, False, "x")), "portions": 0,
            "request": self.number, "checkpoint": self.number, "group": [self.number, "x"],
            "settings": self.any(({}, "x", {"lr": "x"})), "bound": {"x": self.number},
            "step": self.number,
        }  # fmt: skip
        kept = {key: metrics[key] for key in metrics if self.rng.random() < 1 / 2}
        return m.Report(self.name, 1, phase, self.any(("", "server-0", "worker-0")), kept)

    def say_what_it_has_evaluated(self, me: tuple[int, int]) -> m.Message:
        asked = self.coordinator.evaluations.asked
        number = asked.number if asked is not None else self.number
        metrics = self.any(({}, {"loss": float("nan")}, {"loss": "x"}))
        return m.Evaluated(number, self.name, metrics, self.any(("", "made up")))

    def say_that_it_has_drained(self, me: tuple[int, int]) -> m.Message:
        return m.Drained(self.name)

    def say_that_it_cannot_save(self, me: tuple[int, int]) -> m.Message:
        file = self.any((f"{self.name}.safetensors", "shard-0.safetensors", ""))
        numbers = (self.coordinator.checkpointing.number, self.number)
        state = {"lo": self.number, "hi": self.number}
        return m.Saved(
            self.any(numbers), self.name, file, "0" * 64, 3, state, self.any(("", "no space left"))
        )

    def say_that_its_group_is_broken(self, me: tuple[int, int]) -> m.Message:
        generation = self.any((self.coordinator.groups.generation, self.number))
        return m.GroupBroken(*me, generation, "made up", self.any((m.MODEL_LOST, "")))

    def say_where_its_group_meets(self, me: tuple[int, int]) -> m.Message:
        generation = self.any((self.coordinator.groups.generation, self.number))
        return m.GroupNoted(self.name, generation, self.any(("", "nowhere", "10.0.0.1:1")))

    def say_where_a_stream_ends(self, me: tuple[int, int]) -> m.Message:
        ends = [(epoch, shard, 0) for epoch in range(3) for shard in range(3)]
        flat = tuple(number for end in ends for number in end)
        return m.LeaseRequest(*me, self.number, False, flat)

    def say_that_a_portion_is_done(self, me: tuple[int, int]) -> m.Message:
        numbers = (self.number, self.number, self.any((0.0, -1.0, float("inf"), 1e300)))
        end = self.any((-1, 0, self.number))
        return m.PortionDone(*me, *self.portion(), *numbers, {"x": [1.0, self.number]}, end)

    def say_where_it_listens(self, me: tuple[int, int]) -> m.Message:
        """No replica asks there. (Those that ask where nobody answers wait for the liar.)"""
        return m.Listening(*me, self.any(("", "tcp://10.0.0.1:99999", "inproc://nobody")))

    def say_that_it_starts(self, me: tuple[int, int]) -> m.Message:
        return m.Register("simulated", "worker", self.name, self.any((1, self.number)), 1, "", "0")


class OthersChecker(Checker):
    """While one worker lies, no other process is replaced, and the other workers train."""

    def __init__(self, liar: str) -> None:
        self.liar = liar

    def at_end(self, world: World) -> None:
        others = [p for p in world.processes if p.name != self.liar]
        if replaced := [str(process) for process in others if process.incarnation > 1]:
            raise self.broken(f"{', '.join(replaced)}: replaced, although {self.liar} alone lies")
        trainings = [getattr(process.machine, "training", None) for process in others]
        if not any(training is not None and training.writing.steps for training in trainings):
            raise self.broken(f"nobody else has trained, although {self.liar} alone lies")
