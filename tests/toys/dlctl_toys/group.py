"""toy-group: no servers. All replicas sum their gradients and make the same step (synchronous SGD
by all-reduce).

    w -= lr * sum_i n_i g_i / sum_i n_i

Whoever joins takes over the model in one more sum, of the parameters of those who were there. It
guards collectives, groups that lose members, and steps that are done without a push.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Gt

from dlctl.algorithms.base import Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.needs import Collective, Done, Gradient, NextData, Summed, passed_on
from dlctl.job.settings import Live
from dlctl.model.vector import Vector, copy_into


@dataclass(slots=True, kw_only=True)
class Options:
    rate: Live[Annotated[float, Gt(0)]] = 0.1
    """Rate."""


class Replica(ReplicaSide):
    options: Options

    def begin(self, start: Start) -> None:
        self.residual = self.residual[:0]
        self.step = 0
        self._meets = start == "restored"
        """The others have been saved at other steps, perhaps."""

    def state(self) -> dict[str, Vector]:
        return {"step": np.array([self.step], np.float32)}

    def restore(self, state: dict[str, Vector]) -> None:  # type: ignore[override]
        self.step = int(state["step"][0])

    def run(self) -> Needs:
        while True:
            data = yield NextData()
            computed = None if data is None or self._meets else (yield Gradient())
            self._meets = False
            samples = 0 if computed is None else computed.samples
            vector = self.parameters * 0 if computed is None else computed.gradient
            summed: Summed = yield Collective(vector=vector, weight=samples, step=self.step)
            if summed.is_counted and summed.weight:
                copy_into(
                    self.parameters,
                    self.parameters - np.float32(self.options.rate / summed.weight) * summed.vector,
                )
            self.step = summed.step + 1
            if summed.joined:
                model, self.step = yield from passed_on(
                    self.parameters, self.slot, self.step, summed
                )
                copy_into(self.parameters, model)
            if samples and summed.is_counted:
                yield Done()


GROUP = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="replica",
        links=frozenset({"group"}),
        survives=frozenset({"worker", "coordinator"}),
    ),
)
