"""A worker's part in checkpoints: what its replica saves, when, and how it takes it back.

A replica saves its model, if the run's models are those of the replicas; the method's state; its
RNG state; and what torch has, which is requested asynchronously (`TakeComputeState`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from dlctl.algorithms import engines
from dlctl.algorithms.base import ReplicaSide, Shape
from dlctl.job import inner
from dlctl.job.config import JobFile
from dlctl.model.vector import copy_into, to_host
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import (
    ArraysSaved,
    LoadBuffers,
    RestoreComputeState,
    TakeComputeState,
)
from dlctl.roles.protocol.files import saved_file
from dlctl.roles.protocol.saving import Saving
from dlctl.roles.worker.interface import Savable
from dlctl.wire import messages as m

OF_TORCH = (engines.SAVED_AS, inner.SAVED_AS)
"""Name prefixes of torch's state among the arrays that a replica saves."""
W = "w"
GENERATOR = "dice"
RESERVED = frozenset({W, "averaged", GENERATOR})
"""What a replica saves besides the method's state: its model, under the names that shards have in
checkpoints, and its RNG state."""


class Saves:
    def __init__(self, context: Context, name: str, job: JobFile, shape: Shape) -> None:
        """name: the daemon's name. shape: the method's shape."""
        self._context = context
        self._name = name
        self._has_own_model = shape.model != "tables"
        has_scale = job.gradient.precision == "fp16"
        self._of_torch = not inner.keeps_nothing(job.inner) or bool(shape.engine) or has_scale
        """Torch has state of this replica besides the servers' parameters."""
        self._saving = Saving(context, name)
        self._wanted: m.Save | None = None
        """Requested; taken when no step is unpushed, so the residual has only what pushes left."""
        self._taken: tuple[m.Save, dict[str, m.Array], m.Json] | None = None
        """A save that lacks only torch's state: its arrays, and their state."""

    @property
    def newest(self) -> int:
        """Number of the newest checkpoint that is being saved, or is answered; 0: none."""
        return self._saving.newest

    # ------------------------------------------------------------ saving

    def on_save(self, message: m.Save, *, begins: bool) -> None:
        """begins: the replica has begun, or will when its state is restored."""
        if self._taken is not None or not self._saving.is_new(message):
            return
        if begins:
            self._wanted = message
        else:
            self._saving.without_file(message, "")

    def holds(self, side: ReplicaSide) -> bool:
        """Whether no batch may begin until a save has taken its state. Torch's state is requested
        asynchronously, and the next batch could be computed first. Its arrays are not copied, which
        could take twice the memory of the model, so batches wait until they are written.
        """
        if self._wanted is None and self._taken is None:
            return self._saving.is_writing() and self._of_torch
        return self._changes_with_steps(side)

    def _changes_with_steps(self, side: ReplicaSide) -> bool:
        """Whether the saved state changes with every step, not only with pushes."""
        return self._of_torch or self._has_own_model or side.keeps_position

    def take_if_clean(self, replica: Savable) -> bool:
        """Take the requested save if no step is unpushed. Unpushed gradients belong to unfinished
        portions, which a resumed run leases again, so they must not be in the residual as well.
        Torch's state is consistent with it as long as nothing is computed. Returns whether the save
        was taken or answered.
        """
        message = self._wanted
        if message is None or replica.has_unpushed_steps():
            return False
        if self._changes_with_steps(replica.side) and replica.is_at_work():
            return False
        if self._has_own_model and replica.is_paused:
            return False
        self._wanted = None
        if not replica.has_model():
            self._saving.without_file(message, "")  # It holds no model of this run.
            return True
        self._taken = (message, *self._state_of(replica))
        if self._of_torch:
            self._context.do(TakeComputeState())
        else:
            self.on_torch_state({})
        return True

    def _state_of(self, replica: Savable) -> tuple[dict[str, m.Array], m.Json]:
        side, steps = replica.side, replica.steps_made()
        arrays = {name: to_host(vector).copy() for name, vector in side.state().items()}
        if taken := RESERVED & arrays.keys():
            raise TypeError(f"{type(side).__module__}: state() may not name {sorted(taken)}")
        rng_state = json.dumps(side.rng.bit_generator.state).encode()
        arrays[GENERATOR] = np.frombuffer(rng_state, np.uint8)
        if not self._has_own_model:
            return arrays, {"steps": steps}
        arrays[W] = to_host(side.parameters).copy()
        arrays["averaged"] = np.array(replica.averaged)
        return arrays, {"steps": steps, "lo": 0, "hi": arrays[W].size, "version": steps}

    def on_torch_state(self, of_torch: Mapping[str, m.Array]) -> None:
        """Finish the save: torch's state, which was lacking, has arrived."""
        assert self._taken is not None
        (message, arrays, state), self._taken = self._taken, None
        self._saving.begin(message, saved_file(self._name), {**arrays, **of_torch}, state)

    def on_saved(self, event: ArraysSaved) -> None:
        self._saving.on_saved(event)

    # ------------------------------------------------------------ restoring

    def restore(self, side: ReplicaSide, saved: Mapping[str, m.Array]) -> None:
        """Give a replica that has just begun what it has saved before a stop."""
        if self._has_own_model and W in saved:
            copy_into(side.parameters, saved[W])
            self._context.do(LoadBuffers(saved["averaged"]))
        of_torch = {name: saved[name] for name in saved if name.startswith(OF_TORCH)}
        if own := saved.keys() - RESERVED - of_torch.keys():
            side.restore({name: saved[name] for name in own})
        if of_torch:
            self._context.do(RestoreComputeState(of_torch))
        if GENERATOR in saved:
            side.rng.bit_generator.state = json.loads(saved[GENERATOR].tobytes())
