"""`durability = "process"`: the arrays of a shard in a mapped file, every commit atomic.

The last commit stays intact until the next one is complete.

- Dense: an update reads the active buffer and writes the other one. The commit makes the other one
  active.
- Sparse: the old values of the touched elements are saved in the undo record, block by block,
  before they are changed in the active buffer. Recovery rolls back an update that was not
  committed; that is idempotent.
- Without an update a commit is a few hundred bytes.
- The extras have a single place: no commit refers to it before they are set, which happens once.

This relies only on the order of the stores of one thread: a process that maps the file after a kill
sees them in that order. It does not cover a power loss. Other threads that help with an update
complete their parts before its commit begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dlctl import kernels
from dlctl.compress.base import Delta
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, BlockPlace, Cut, KeptArrays, Rule, go_over, update_in_place
from dlctl.shards import image
from dlctl.shards.ahead import Ahead
from dlctl.shards.base import NOTHING, Extras, Spec, W, check_state, no_point
from dlctl.shards.image import CommittedState, ImageForm
from dlctl.shards.log import Point
from dlctl.shards.memory import parted
from dlctl.util import threads
from dlctl.util.threads import BLOCK, PLACES
from dlctl.wire.messages import Array, Json


class Mapped:
    """The arrays of one shard in any writable buffer of `ImageForm.total_bytes` bytes."""

    survives = True

    def __init__(self, buffer: Any, form: ImageForm, newest: CommittedState, point: Point) -> None:
        """Not to be called directly: use `create` or `reopen`."""
        self._form = form
        self._point = point
        self._newest = newest
        self._commits_at = [form.commit_at(which) for which in (0, 1)]
        self._use(buffer)
        self._vectors = self._views[newest.current]
        """The active buffer, or the other one while it has an uncommitted update."""
        self._is_undoable = False
        """Whether that buffer has an uncommitted update whose old values are in the undo record."""
        self._ahead: Ahead | None = None
        """A prepared update that may be the next one."""
        self._extras_crc: int | None = newest.body["extras"]
        self._updated = bool(newest.body.get("updated"))
        self._takes_matrices = False

    def _use(self, buffer: Any) -> None:
        """Point all views to this buffer."""
        form = self._form
        self._buffer = memoryview(buffer)
        self._undo = form.undo(buffer)
        self._done = image.done_mark(buffer)
        self._views = [form.vectors(buffer, which) for which in range(image.BUFFERS)]

    @staticmethod
    def create(buffer: Any, spec: Spec, boot_id: str, point: Point = no_point) -> Mapped:
        """A new state. The header is written last: without it the file is no state."""
        form = ImageForm.of(spec, boot_id)
        view = memoryview(buffer)
        assert len(view) == form.total_bytes, f"{len(view)} bytes for {form.total_bytes}"
        view[: form.undo_at] = bytes(form.undo_at)
        for name, array in form.vectors(buffer, 0).items():
            array[:] = spec.slots.get(name, 0.0)
        form.extras(buffer)[:] = 0
        form.undo(buffer).begin(0)
        point("state begun")
        body = {"state": {}, "updated": False, "extras": None, "sealed": None}
        storage = Mapped(buffer, form, CommittedState(0, 0, body), point)
        storage._takes_matrices = spec.kept is not None
        storage._write(body, 0)
        image.write_header(buffer, form)
        point("state created")
        return storage

    @staticmethod
    def reopen(buffer: Any, spec: Spec, boot_id: str, point: Point = no_point) -> Mapped:
        """The state of the last commit; later changes are rolled back.

        Raises Unusable if it is of another run, shard, size, format or boot, or damaged.
        """
        form = image.read_header(buffer)
        image.check_is(form, ImageForm.of(spec, boot_id))
        newest = image.newest_commit(buffer, form)
        storage = Mapped(buffer, form, newest, point)
        storage._takes_matrices = spec.kept is not None
        for indices, values in storage._undo.pending(newest.number + 1, form.size):
            for array, old in zip(storage._vectors.values(), values, strict=True):
                array[indices] = old
        image.check_seal(buffer, form, newest)
        image.check_finite(storage._vectors)
        return storage

    # ------------------------------------------------------------ reading

    @property
    def w(self) -> Array:
        return self._vectors[W]

    @property
    def slots(self) -> Mapping[str, Array]:
        return {name: self._vectors[name] for name in self._form.slots}

    @property
    def kept(self) -> Mapping[str, Array]:
        return parted(self._vectors)[1]

    @property
    def extras(self) -> Extras:
        return Extras(self._form.extras(self._buffer))

    def resume(self, optimizer: Optimizer) -> Json:
        state = check_state(self._newest.body["state"], optimizer)
        if state:
            optimizer.lr = state["lr"]
            optimizer.counters.update(state["counters"])
        return state

    # ------------------------------------------------------------ updates

    def prepare(self, delta: Delta, count: int, next_rule: Callable[[], Rule] | None) -> bool:
        """Into the inactive buffer: one update at a time, and only while it is free."""
        is_free = self._ahead is None and not self._is_dirty() and not self._is_undoable
        if next_rule is not None and is_free:
            self._ahead = Ahead(delta, self._across(delta), next_rule())
        if self._ahead is None or not self._ahead.is_of(delta):
            return False
        self._ahead.come(count)
        return True

    def prepared_squares(self, delta: Delta) -> float | None:
        ahead = self._ahead
        return None if ahead is None or not ahead.is_of(delta) else ahead.squares()

    def forget_prepared(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.drop()

    def update(
        self, delta: Delta, rule: Rule, lr: float, counters: Mapping[str, int] = NOTHING
    ) -> None:
        self._updated = True
        if self._ahead is not None and self._ahead.is_of(delta):
            self._ahead.finish()
            self._ahead, self._vectors = None, self._following
            return
        self.forget_prepared()
        if self._takes_matrices:
            self._whole(delta, rule)
            return
        where = delta.indices
        if not self._is_dirty():
            if where is None:
                go_over(delta, self._across(delta), rule)
                self._vectors = self._following
                return
            if where.size <= self._form.undo_max and not self._is_undoable:
                self._undoable(delta, where, rule)
                return
            self._go_dense()
        update_in_place(self.w, delta, self.slots, rule)

    def _whole(self, delta: Delta, rule: Rule) -> None:
        """An update of all elements in one block: from the active buffer to the other one, or there
        in place."""
        present, following = self._vectors, self._following
        slots, kept = parted(present)
        slots_next, kept_next = parted(following)
        if present is not following:
            for name, values in kept.items():
                kept_next[name][:] = values
        block = Block(
            BlockPlace(0, kept=KeptArrays(kept, kept_next)), present[W],
            delta.dense(self._form.size), tuple(slots.values()), following[W],
            tuple(slots_next.values()),
        )  # fmt: skip
        rule([block])
        self._point("block updated")
        self._vectors = following

    def fill(self, vectors: Mapping[str, Array], extras: Extras | None) -> None:
        self._updated = False
        self.forget_prepared()
        if not self._is_dirty():
            self._go_dense()
        for name, values in vectors.items():
            self._vectors[name][:] = values
            self._point("vector filled")
        if extras is not None:
            self._form.extras(self._buffer)[:] = extras.averaged
            self._extras_crc = self._form.extras_crc(self._buffer)
            self._point("extras filled")

    def _is_dirty(self) -> bool:
        return self._vectors is not self._views[self._newest.current]

    @property
    def _following(self) -> dict[str, Array]:
        """The vectors of the inactive buffer."""
        return self._views[1 - self._newest.current]

    def _across(self, delta: Delta) -> Cut:
        """The blocks of a dense update from the active buffer to the other one."""
        present, following = list(self._vectors.values()), list(self._following.values())

        def across(lo: int, hi: int) -> Iterator[Block]:
            for at in range(lo, hi, BLOCK):
                cut = slice(at, min(at + BLOCK, hi))
                w, *slots = (array[cut] for array in present)
                w_next, *slots_next = (array[cut] for array in following)
                yield Block(
                    BlockPlace(at), w, delta.values[cut], tuple(slots), w_next, tuple(slots_next)
                )
                self._point("block updated")

        return across

    def _undoable(self, delta: Delta, where: Array, rule: Rule) -> None:
        """A sparse update in the active buffer, of which only the touched elements are accessed."""
        undo, vectors = self._undo, list(self._vectors.values())
        undo.begin(self._newest.number + 1)
        self._point("undo begun")

        def saved(lo: int, hi: int) -> Iterator[Block]:
            room = [np.empty(min(PLACES, hi - lo), array.dtype) for array in vectors]
            for at in range(lo, hi, PLACES):
                end = min(at + PLACES, hi)
                chosen, following = where[at:end], [array[: end - at] for array in room]
                indices, present = undo.cut(at, end)
                indices[:] = chosen
                for array, old in zip(vectors, present, strict=True):
                    kernels.gather(array, chosen, old)
                self._point("undo block written")
                undo.mark(at, end)
                w, *slots = present
                w_next, *slots_next = following
                place, values = BlockPlace(at, chosen), delta.values[at:end]
                yield Block(place, w, values, tuple(slots), w_next, tuple(slots_next))
                for array, new in zip(vectors, following, strict=True):
                    kernels.scatter(array, chosen, new)
                    self._point("block scattered")

        go_over(delta, saved, rule)
        self._is_undoable = True

    def _go_dense(self) -> None:
        """Copy everything to the other buffer."""
        target = self._following
        for present, following in zip(self._vectors.values(), target.values(), strict=True):
            threads.copy(following, present)
            self._point("vector copied")
        self._vectors = target

    # ------------------------------------------------------------ commits

    def commit(self, state: Json, *, may_rotate: bool = True) -> None:
        self._point("commit begun")
        current = self._newest.current
        if self._is_dirty():
            current = 1 - current
        body = {"state": state, "updated": self._updated, "extras": self._extras_crc}
        self._write({**body, "sealed": None}, current)
        self._is_undoable = False
        self._point("commit written")

    def _write(self, body: Json, current: int) -> None:
        commit = CommittedState(self._newest.number + 1, current, body)
        data = image.pack_commit(self._form, commit)
        at, half = self._commits_at[commit.number % 2], len(data) // 2
        self._buffer[at : at + half] = data[:half]
        self._point("commit half written")
        self._buffer[at + half : at + len(data)] = data[half:]
        self._done[:] = commit.number
        self._newest = commit

    def close(self) -> None:
        """Seal the state: commit it once more, with a checksum of everything."""
        self.forget_prepared()
        if self._is_undoable or self._is_dirty():
            return  # An uncommitted update; the last commit is the state.
        current = self._newest.current
        body = {**self._newest.body, "sealed": self._form.vectors_crc(self._buffer, current)}
        self._write(body, current)
        self._point("state sealed")

    # ------------------------------------------------------------ moving

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer that this state needs."""
        return self._form.total_bytes

    def move(self, buffer: Any) -> None:
        """Move everything to another buffer of `size_bytes` bytes, and continue there.

        The header is written last, as in `create`. The values of `w`, `slots` and `extras` do not
        change. The old buffer is not needed any more.
        """
        self.forget_prepared()
        view, old = memoryview(buffer), self._buffer
        assert len(view) == len(old), f"{len(view)} bytes for {len(old)}"
        view[image.DONE_AT :] = old[image.DONE_AT :]
        self._point("state copied")
        view[: image.DONE_AT] = old[: image.DONE_AT]
        which = 0 if self._vectors is self._views[0] else 1
        self._use(buffer)
        self._vectors = self._views[which]
