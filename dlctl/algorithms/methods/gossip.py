"""Gossiping SGD: replicas average with a random other replica, and none waits. Jin et al., "How to
scale distributed deep learning?", 2016, section 3; symmetric: Lian et al., "Asynchronous
Decentralized Parallel SGD", ICML 2018.

Every replica i steps with its own optimiser, and every tau steps it contacts a random j:

    pull         requests theta_j              theta_i = (1 - beta) theta_i + beta theta_j
    push         sends theta_i                 theta_j = (1 - beta) theta_j + beta theta_i
    symmetric    sends theta_i, j answers      delta = beta (theta_i - theta_j)
                                               theta_j += delta,  theta_i -= delta

tau = `contact_every_steps`; with `random_times` a contact has the probability 1 / tau at each step.
beta = `mix`, 1/2 in the paper. Replicas send a snapshot between two steps. They do not wait for an
answer: it is applied between two steps after its arrival, `age` steps after the request. A replica
has one contact at a time: with several, each would start from the parameters before the others.

- Only "symmetric" conserves the mean of all replicas: pull and push let it drift. Both replicas
  move by the same delta, however late it arrives, so the request has no timeout while the other
  replica is alive. If an answer is lost, the request is retried, and yields the same delta.
- Pull and push give up a contact after `CONTACT_S`; a push may still arrive.
- The model of the run is the mean of all replicas: it is evaluated, exported, and shown by
  `status`. `consensus_distance`, a figure of each evaluation, is the replicas' distance from it.
- Of two replicas that contact each other at the same time, symmetrically, one contact counts: that
  of the lower slot.
- A checkpoint may be saved between the two halves of an exchange: resuming from it does not
  conserve the mean.
- Optimisers' states are not averaged, as in the paper.
- A replica that joins, or whose checkpoint is lost, begins with the model of another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Gt, Le

from dlctl.algorithms.base import Fault, Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.needs import Ask
from dlctl.algorithms.rounds import step_alone
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import Choice, JobFile
from dlctl.job.settings import Live
from dlctl.model.vector import Vector, all_finite, copy_into, to_host
from dlctl.wire.messages import Array, Json

CONTACT_S = 5.0
AGE_WEIGHT = 0.1
"""Weight of the newest exchange in the reported figures."""


@dataclass(slots=True, kw_only=True)
class Options:
    mode: Literal["pull", "push", "symmetric"] = "symmetric"
    """Which replica a contact changes: pull: the one that makes it. push: the other one. symmetric:
    both, which conserves the mean."""
    contact_every_steps: Live[Annotated[int, Ge(1)]] = 1
    """Steps from one contact to the next, tau."""
    random_times: bool = False
    """A contact after each step with probability 1/tau, instead of every tau steps."""
    mix: Annotated[float, Gt(0), Le(0.5)] = 0.5
    """Weight of the other model in the average, beta."""


class Replica(ReplicaSide):
    options: Options

    def begin(self, start: Start) -> None:
        self.steps = 0
        self.asked_at: dict[int, int] = {}
        """Slot -> own step when the request was sent; it is not answered yet."""
        self.exchanges = 0
        self.age = self.distance = 0.0
        """Running means over exchanges: own steps between request and answer; distance of the
        models.
        """

    def state(self) -> dict[str, Vector]:
        return {"steps": np.array([self.steps], np.float64)}

    @classmethod
    def state_after(cls, steps: int, samples: int) -> dict[str, Array]:
        return {"steps": np.array([steps], np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.steps = int(state["steps"][0])

    def run(self) -> Needs:
        while True:
            if not (yield from step_alone()):
                continue
            self.steps += 1
            others = sorted(self.members - {self.slot})
            if others and not self.asked_at and self._is_time():
                other = int(self.rng.choice(others))
                self.asked_at[other] = self.steps
                yield self._contact(other)

    def _is_time(self) -> bool:
        every = self.options.contact_every_steps
        if self.options.random_times:
            return bool(self.rng.random() < 1 / every)
        return self.steps % every == 0

    def _contact(self, other: int) -> Ask:
        mode = self.options.mode
        me = np.array([self.slot], np.float32)
        arrays = () if mode == "pull" else (to_host(self.parameters), me)
        within_s = math.inf if mode == "symmetric" else CONTACT_S
        return Ask(
            slot=other,
            op=mode,
            arrays=arrays,
            within_s=within_s,
            then=partial(self._answered, other),
        )

    def _answered(self, slot: int, arrays: tuple[Array, ...] | None) -> None:
        age = self.steps - self.asked_at.pop(slot)
        if not arrays:
            return
        mine, (theirs,) = to_host(self.parameters), arrays
        if theirs.shape != mine.shape or not all_finite(theirs):
            return
        if self.options.mode == "symmetric":
            self._move(-theirs, age)
        else:
            self._move(np.float32(self.options.mix) * (theirs - mine), age)

    def serve(self, op: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Called between two steps, so the parameters are consistent."""
        mine = to_host(self.parameters)
        if op == "pull" and not arrays:
            return (mine,)
        if op not in ("push", "symmetric") or len(arrays) != 2 or arrays[1].size != 1:
            raise RemoteProtocolError(f"gossip has no {op:.20} with {len(arrays)} arrays")
        theirs, who = arrays[0], int(arrays[1][0])
        if op == "symmetric" and who in self.asked_at and self.slot < who:
            return ()  # Both would move twice: with a mix of 1/2 they would only swap models.
        if theirs.dtype != np.float32 or theirs.shape != mine.shape or not all_finite(theirs):
            raise RemoteProtocolError("that is no model of this run")
        delta = np.float32(self.options.mix) * (theirs - mine)
        self._move(delta)
        return (delta,) if op == "symmetric" else ()

    def _move(self, delta: Array, age: int = 0) -> None:
        copy_into(self.parameters, to_host(self.parameters) + delta)
        self.exchanges += 1
        apart = float(np.linalg.norm(delta)) / self.options.mix
        self.age += AGE_WEIGHT * (age - self.age)
        self.distance += AGE_WEIGHT * (apart - self.distance)

    def figures(self) -> Json:
        return {
            "exchanges": self.exchanges, "age": round(self.age, 3),
            "distance": float(f"{self.distance:.4g}"),
        }  # fmt: skip


def check(job: JobFile) -> list[Fault]:
    """A fault if the job has a single replica."""
    if job.workers.count > 1:
        return []
    return [(("workers", "count"), "gossip needs another replica", "use 2 or more")]


GOSSIP = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="mean",
        links=frozenset({"peers"}),
        survives=frozenset({"worker", "coordinator"}),
    ),
    inner=Choice(name="sgd", options={"lr": 0.01}),
    check=check,
)
