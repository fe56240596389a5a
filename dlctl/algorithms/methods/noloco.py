"""NoLoCo: DiLoCo's outer steps with one random replica instead of all. Kolehmainen et al., "NoLoCo:
No-all-reduce Low Communication Training Method for Large Models", 2025, section 3.

Every replica i makes H steps with its own optimiser, from phi_i to theta_i, and then an outer step
with a random j (n = 2):

    Delta_i = theta_i - phi_i
    delta_i = alpha delta_i + beta (Delta_i + Delta_j) / 2 - gamma (phi_i - (phi_i + phi_j) / 2)
    phi_i   = phi_i + delta_i,     and the next steps begin there

alpha = `outer_momentum`, beta = `outer_lr`, gamma = `consensus`: the last term holds the replicas
together without a sum over all of them. H = `local_steps`.

- In the paper both replicas of a pair wait for each other, and make the outer step together. Here i
  sends a request, and j answers between two of its steps with its current Delta_j; j makes its own
  outer step with another replica. So no replica waits for a slower one.
- The momentum is smaller than DiLoCo's 0.9. Without gradients, 2 to 16 replicas converge to each
  other with alpha 0.5 and gamma up to 1.3, in the paper's pairs and in these; with alpha 0.9 and
  gamma 0.6 or more they diverge, in both.
- Without an answer in `CONTACT_S`, and alone, the outer step is of this replica's Delta only.
- The paper's random routing of activations through pipeline stages is not implemented.
- The model of the run is the mean of all replicas, as with `gossip`. Inner optimisers are not
  averaged.
- A replica that joins begins with the model of another one, and without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from dlctl.algorithms.base import Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.needs import Ask, NextData
from dlctl.algorithms.rounds import step_alone
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import Choice
from dlctl.job.settings import Live
from dlctl.model.vector import Vector, all_finite, copy_into, to_host
from dlctl.wire.messages import Array, Json

CONTACT_S = 10.0
OP = "pair"


@dataclass(slots=True, kw_only=True)
class Options:
    local_steps: Live[Annotated[int, Ge(1)]] = 50
    """The steps from one outer step to the next, H."""
    outer_lr: Annotated[float, Gt(0), Le(2)] = 0.7
    """The outer learning rate, beta."""
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.5
    """alpha. Above 0.7 replicas may not stay together."""
    consensus: Annotated[float, Gt(0), Le(2)] = 1.0
    """gamma: fraction of the distance to the mean of the pair that is corrected."""


class Replica(ReplicaSide):
    options: Options

    def begin(self, start: Start) -> None:
        self.steps = self.outer_steps = self.alone = 0
        self.phi: Array | None = None
        """float32[d], the parameters after the last outer step; None: it has not begun."""
        self.delta: Array = np.zeros(0, np.float32)

    def state(self) -> dict[str, Vector]:
        state = {"steps": np.array([self.steps], np.float64)}
        return state if self.phi is None else state | {"phi": self.phi, "delta": self.delta}

    @classmethod
    def state_after(cls, steps: int, samples: int) -> dict[str, Array]:
        return {"steps": np.array([steps], np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.steps = int(state["steps"][0])
        if "phi" in state:
            self.phi, self.delta = state["phi"], state["delta"]

    def run(self) -> Needs:
        while (yield NextData()) is None:
            continue  # The first steps begin at the model of the run, once it is there.
        if self.phi is None:
            self.phi = to_host(self.parameters).copy()
            self.delta = np.zeros_like(self.phi)
        while True:
            if not (yield from step_alone()):
                continue
            self.steps += 1
            if self.steps % self.options.local_steps == 0:
                yield from self._outer_step(self.phi)

    def _outer_step(self, phi: Array) -> Needs:
        answer: tuple[Array, ...] | None = None
        if others := sorted(self.members - {self.slot}):
            slot = int(self.rng.choice(others))
            answer = yield Ask(slot=slot, op=OP, within_s=CONTACT_S)
        displacement: Array = to_host(self.parameters) - phi
        middle: Array = phi
        if answer and len(answer) == 2 and all(_is_like(phi, array) for array in answer):
            middle, displacement = (phi + answer[0]) / 2, (displacement + answer[1]) / 2
        else:
            self.alone += 1
        o = self.options
        self.delta = (
            o.outer_momentum * self.delta + o.outer_lr * displacement - o.consensus * (phi - middle)
        )
        self.phi = phi + self.delta
        copy_into(self.parameters, self.phi)
        self.outer_steps += 1

    def serve(self, op: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        if op != OP or arrays:
            raise RemoteProtocolError(f"noloco has no {op:.20} with {len(arrays)} arrays")
        mine = to_host(self.parameters)
        phi = mine if self.phi is None else self.phi
        return phi, mine - phi

    def figures(self) -> Json:
        return {"outer_steps": self.outer_steps, "alone": self.alone}


def _is_like(phi: Array, array: Array) -> bool:
    return array.dtype == phi.dtype and array.shape == phi.shape and all_finite(array)


NOLOCO = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="mean",
        links=frozenset({"peers"}),
        survives=frozenset({"worker", "coordinator"}),
    ),
    inner=Choice(name="adamw", options={"lr": 0.001}),
)
