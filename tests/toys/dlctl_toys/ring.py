"""toy-ring: no servers. After each step a replica asks its right neighbour for its model, and goes
on from the mean of both (gossip in a ring, Jin 2016).

    w_i -= lr * grad(w_i);  w_i = (w_i + w_j) / 2,  j: the next slot that takes part

It guards runs without servers, questions from replica to replica, steps that are done without a
push, members, and a replica's own state in checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlctl.algorithms.base import Method, Needs, ReplicaSide, Shape, Start
from dlctl.algorithms.needs import Ask
from dlctl.algorithms.rounds import step_alone
from dlctl.errors import RemoteProtocolError
from dlctl.job.config import Choice
from dlctl.model.vector import Vector, copy_into, to_host
from dlctl.wire.messages import Array


@dataclass(slots=True, kw_only=True)
class Options:
    pass


class Replica(ReplicaSide):
    options: Options

    def begin(self, start: Start) -> None:
        self.residual = self.residual[:0]

    def state(self) -> dict[str, Vector]:
        return {}

    def run(self) -> Needs:
        while True:
            if not (yield from step_alone()):
                continue
            neighbour = self._neighbour()
            if neighbour != self.slot:
                answer = yield Ask(slot=neighbour, op="model", within_s=1.0)
                if answer is not None:
                    self._mix(answer, 0.5)

    def _mix(self, answer: tuple[Array, ...], share: float) -> None:
        (theirs,) = answer
        if theirs.size != len(self.parameters):
            return
        mine = to_host(self.parameters)
        copy_into(self.parameters, ((1 - share) * mine + share * theirs).astype("float32"))

    def _neighbour(self) -> int:
        others = sorted(self.members | {self.slot})
        return others[(others.index(self.slot) + 1) % len(others)]

    def serve(self, op: str, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        if op != "model" or arrays:
            raise RemoteProtocolError(f"toy-ring has no {op:.20}")
        return (to_host(self.parameters).copy(),)


RING = Method(
    Options=Options,
    replica=Replica,
    shape=Shape(
        tables=(),
        model="replica",
        links=frozenset({"peers"}),
        survives=frozenset({"worker", "coordinator"}),
    ),
    inner=Choice(name="sgd", options={"lr": 0.05}),
)
