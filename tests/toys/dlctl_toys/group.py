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
from dlctl.algorithms.needs import Collective, Done, Gradient, NextData, Summed
from dlctl.settings import Setting, number
from dlctl.vector import Vector, copy_into


@dataclass(slots=True, kw_only=True)
class Options:
    rate: Annotated[float, Gt(0)] = 0.1
    """Rate. Changes live."""


class Replica(ReplicaSide):
    options: Options

    def begin(self, start: Start) -> None:
        self.residual = self.residual[:0]
        self.step = 0

    def state(self) -> dict[str, Vector]:
        return {"step": np.array([self.step], np.float32)}

    def restore(self, state: dict[str, Vector]) -> None:  # type: ignore[override]
        self.step = int(state["step"][0])

    def run(self) -> Needs:
        while True:
            data = yield NextData()
            computed = None if data is None else (yield Gradient())
            samples = 0 if computed is None else computed.samples
            vector = self.parameters * 0 if computed is None else computed.gradient
            summed: Summed = yield Collective(vector=vector, weight=samples, step=self.step)
            if summed.is_counted:
                self._make_step(summed)
                if samples:
                    yield Done()
            yield from self._hand_on(summed)

    def _make_step(self, summed: Summed) -> None:
        self.step += 1
        if summed.weight:
            rate = np.float32(self.options.rate / summed.weight)
            copy_into(self.parameters, self.parameters - rate * summed.vector)

    def _hand_on(self, result: Summed) -> Needs:
        """Whoever has joined gets the model that the others have come to. Somebody may join while
        they do this.
        """
        has_model = result.is_counted
        while result.joined:
            weight = 1.0 if has_model else 0.0
            result = yield Collective(vector=self.parameters, weight=weight, step=self.step)
            if result.weight:
                # Everybody, for a mean of equals may differ from them in the last bit.
                copy_into(self.parameters, result.vector / np.float32(result.weight))
            self.step, has_model = result.step, True


GROUP = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="replica",
        links=frozenset({"group"}),
        survives=frozenset({"worker", "coordinator"}),
    ),
    live={"rate": Setting(help="rate of the common step", parse=number)},
)
