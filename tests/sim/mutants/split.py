"""Bugs of split learning: what the head and its clients make of a batch that comes again."""

from __future__ import annotations

from planting import Patch, mutant

from dlctl.algorithms.barrier import Barrier
from dlctl.algorithms.means import Mean
from dlctl.algorithms.methods.split import Once, Replica
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.worker.services.handed_on import HandedOn
from dlctl.roles.worker.services.remote import Remote


@mutant("h steps twice with a batch that is leased again", "SplitChecker", scenario="split")
def h_steps_twice(patch: Patch) -> None:
    patch.setattr(Once, "is_new", lambda self, push: True)


@mutant(
    "a batch that h has had is answered with the h after it", "SplitChecker", scenario="split",
    first=3,
)  # fmt: skip
def f_steps_on_a_newer_h(patch: Patch) -> None:
    patch.setattr(Replica, "_kept", lambda self, batch, op: None)


@mutant(
    "a client goes on with its last answer when the head has died over the next one",
    "SplitChecker", scenario="split", seeds=40,
)  # fmt: skip
def a_lost_answer_is_the_last_one(patch: Patch) -> None:
    honest = Remote._on_answer

    def on_answer(self, arrays):
        honest(self, arrays or self._asking.newest or None)

    patch.setattr(Remote, "_on_answer", on_answer)


@mutant(
    "the gradients of the last step of all clients never come into h", "SplitChecker",
    scenario="split", first=2,
)  # fmt: skip
def the_last_step_is_not_made(patch: Patch) -> None:
    patch.setattr(Replica, "leave", lambda self: ())


@mutant(
    "a head that dies while the run drains is not replaced", "SplitChecker", "LivenessChecker",
    scenario="split", first=1,
)  # fmt: skip
def no_next_head_while_draining(patch: Patch) -> None:
    patch.setattr(RunShutdown, "needs", lambda self, worker: False)


@mutant(
    "the average of a round counts clients and not their samples", "SplitChecker",
    scenario="split", first=5,
)  # fmt: skip
def rounds_forget_samples(patch: Patch) -> None:
    patch.setattr(Mean, "shares", lambda self, pushes: [1 / len(pushes)] * len(pushes))


@mutant(
    "a round is averaged before all clients have arrived", "SplitChecker", scenario="split",
    first=5,
)  # fmt: skip
def rounds_end_early(patch: Patch) -> None:
    patch.setattr(Barrier, "_is_complete", lambda self, clock: bool(self._newest()))


@mutant("a client in turn goes on with its own buffers", "SplitChecker", scenario="split")
def buffers_are_not_read(patch: Patch) -> None:
    patch.setattr(HandedOn, "want", lambda self, number: None)
