"""`durability = "process"`: the arrays of a shard in a mapped file, every commit atomic.

Nothing of the last commit is overwritten before the next one is whole; that is all there is to it.

- Dense: the next values are read from the buffer that counts and written into the other one. The
  commit says that the other one counts from now on.
- Sparse: the touched elements are gathered into a redo area and changed there. The commit refers
  to it; later they are scattered into the buffer that counts: before anybody looks at it again, or
  when there is nothing else to do. Who opens the state scatters the redo record of the newest
  commit again, which changes nothing if that was done before.
- Without an update a commit is a few hundred bytes.
- The extras have one place only: no commit refers to it before they are set, which is done once.

The order of the stores of one thread is all that this relies on: the kernel shows them in that
order to whoever maps the file after the process was killed. It says nothing about a power loss.
Other threads that help with an update have ended their part of it before its commit begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlctl import parallel
from dlctl.compress.base import Delta
from dlctl.messages import Array, Json
from dlctl.optim.base import Optimizer
from dlctl.optim.blocks import Block, Rule, check_length, go_over, update_in_place
from dlctl.parallel import BLOCK
from dlctl.shards import image
from dlctl.shards.base import Extras, Point, Spec, Unusable, W, check_state, no_point
from dlctl.shards.image import Commit, Form
from dlctl.vector import put

SCATTERED = 2 * BLOCK
"""Elements that one thread scatters at once."""


@dataclass(frozen=True, slots=True)
class _Redo:
    """A sparse update that is not in the buffers yet."""

    area: int
    where: Array
    """int64[count]: its elements, as the delta has them."""
    values: list[Array]
    """float32[count] for each vector: what they will be."""


class Mapped:
    """The arrays of one shard in any writable buffer of `Form.total_bytes` bytes."""

    survives = True

    def __init__(self, buffer: Any, form: Form, newest: Commit, point: Point) -> None:
        """Use `create` or `reopen`."""
        self._form = form
        self._point = point
        self._newest = newest
        self._places = [form.commit_at(which) for which in (0, 1)]
        self._use(buffer)
        self._vectors = self._views[newest.current]
        """The buffer that counts, or the other one while it has an update without a commit."""
        self._area = newest.area
        """The redo area that a commit may still refer to."""
        self._redo: _Redo | None = None
        """Of an update that is not committed."""
        self._put_off: _Redo | None = None
        """Of the newest commit, if it was not scattered yet."""
        self._extras_crc: int | None = newest.body["extras"]
        self._updated = bool(newest.body.get("updated"))

    def _use(self, buffer: Any) -> None:
        """All views are of this buffer from now on."""
        form = self._form
        self._buffer = memoryview(buffer)
        self._areas = [form.redo_area(buffer, area) for area in (0, 1)]
        self._done = image.done_mark(buffer)
        self._views = [form.vectors(buffer, which) for which in range(image.BUFFERS)]

    @staticmethod
    def create(buffer: Any, spec: Spec, boot_id: str, point: Point = no_point) -> Mapped:
        """A new state. The header comes last: without it nobody takes the rest for a state."""
        form = Form.of(spec, boot_id)
        view = memoryview(buffer)
        assert len(view) == form.total_bytes, f"{len(view)} bytes for {form.total_bytes}"
        view[: form.redo_at(0)] = bytes(form.redo_at(0))
        for name, array in form.vectors(buffer, 0).items():
            array[:] = spec.slots.get(name, 0.0)
        for extra in form.extras(buffer):
            extra[:] = 0
        point("state begun")
        body = {"state": {}, "updated": False, "extras": None, "sealed": None}
        storage = Mapped(buffer, form, Commit(0, 0, body), point)
        storage._write(body, 0)
        image.write_header(buffer, form)
        point("state created")
        return storage

    @staticmethod
    def reopen(buffer: Any, spec: Spec, boot_id: str, point: Point = no_point) -> Mapped:
        """The state of the last commit, completed if need be.

        Raises Unusable if it is of another run, shard, size, format or boot, or damaged.
        """
        form = image.read_header(buffer)
        image.check_is(form, Form.of(spec, boot_id))
        newest = image.newest_commit(buffer, form)
        storage = Mapped(buffer, form, newest, point)
        if newest.count:
            indices, values = storage._areas[newest.area].cut(newest.count)
            if not 0 <= int(indices.min()) <= int(indices.max()) < form.size:
                raise Unusable("its redo record has elements beyond the shard")
            storage._scatter(indices.astype(np.int64), values)
        for name, array in storage._vectors.items():
            if not _is_finite(array):
                raise Unusable(f'its vector "{name}" has values that are not finite')
        return storage

    # ------------------------------------------------------------ reading

    @property
    def w(self) -> Array:
        return self._now()[W]

    @property
    def slots(self) -> Mapping[str, Array]:
        now = self._now()
        return {name: now[name] for name in self._form.slots}

    def _now(self) -> Mapping[str, Array]:
        """The vectors with every update; looking at them changes nothing."""
        redo = self._redo or self._put_off
        if redo is None:
            return self._vectors
        now = {name: array.copy() for name, array in self._vectors.items()}
        for array, values in zip(now.values(), redo.values, strict=True):
            array[redo.where] = values
        return now

    @property
    def extras(self) -> Extras:
        return Extras(*self._form.extras(self._buffer))

    def resume(self, optimizer: Optimizer) -> Json:
        state = check_state(self._newest.body["state"], optimizer)
        if state:
            optimizer.lr = state["lr"]
            optimizer.counters.update(state["counters"])
        return state

    # ------------------------------------------------------------ updates

    def update(self, delta: Delta, rule: Rule) -> None:
        check_length(delta, self._form.size)
        self.catch_up()
        self._updated = True
        if self._redo is not None:
            self._go_dense()
        if self._is_dirty():
            self._in_place(delta, rule)
        elif delta.indices is None:
            self._across(delta, rule)
        elif delta.indices.size <= self._form.redo_max:
            self._gather(delta, delta.indices, rule)
        else:
            self._go_dense()
            self._in_place(delta, rule)

    def fill(self, vectors: Mapping[str, Array], extras: Extras | None) -> None:
        self.catch_up()
        self._updated = False
        if not self._is_dirty():
            self._go_dense()
        for name, values in vectors.items():
            self._vectors[name][:] = values
            self._point("vector filled")
        if extras is not None:
            for place, values in zip(
                self._form.extras(self._buffer), (extras.averaged, extras.constant), strict=True
            ):
                place[:] = values
            self._extras_crc = self._form.extras_crc(self._buffer)
            self._point("extras filled")

    def _is_dirty(self) -> bool:
        return self._vectors is not self._views[self._newest.current]

    def _in_place(self, delta: Delta, rule: Rule) -> None:
        slots = {name: self._vectors[name] for name in self._form.slots}
        update_in_place(self._vectors[W], delta, slots, rule)

    def _across(self, delta: Delta, rule: Rule) -> None:
        """A dense update on its way from one buffer to the other."""
        target = self._views[1 - self._newest.current]
        present, following = list(self._vectors.values()), list(target.values())

        def across(lo: int, hi: int) -> Iterator[Block]:
            for at in range(lo, hi, BLOCK):
                cut = slice(at, min(at + BLOCK, hi))
                w, *slots = (array[cut] for array in present)
                w_next, *slots_next = (array[cut] for array in following)
                yield Block(at, w, delta.values[cut], tuple(slots), w_next, tuple(slots_next))
                self._point("block updated")

        go_over(delta, across, rule)
        self._vectors = target

    def _gather(self, delta: Delta, where: Array, rule: Rule) -> None:
        """A sparse update in a redo area. It reads no more than it touches."""
        area = 1 - self._area
        indices, values = self._areas[area].cut(where.size)
        indices[:] = where
        vectors = list(self._vectors.values())

        def gathered(lo: int, hi: int) -> Iterator[Block]:
            for at in range(lo, hi, BLOCK):
                cut = slice(at, min(at + BLOCK, hi))
                chosen, parts = where[cut], [array[cut] for array in values]
                for array, part in zip(vectors, parts, strict=True):
                    # The indices were checked on their way in; checking them again takes a copy.
                    np.take(array, chosen, out=part, mode="clip")
                yield Block.in_place(at, parts[0], delta.values[cut], tuple(parts[1:]))
                self._point("redo block written")

        go_over(delta, gathered, rule)
        if where.size:
            self._redo = _Redo(area, where, values)

    def _go_dense(self) -> None:
        """Copy everything to the other buffer, with the update that waits in the redo area."""
        redo, self._redo = self._redo, None
        target = self._views[1 - self._newest.current]
        for present, following in zip(self._vectors.values(), target.values(), strict=True):
            parallel.copy(following, present)
            self._point("vector copied")
        self._vectors = target
        if redo is not None:
            self._scatter(redo.where, redo.values)

    def _scatter(self, where: Array, values: list[Array]) -> None:
        def scatter(lo: int, hi: int) -> None:
            # Backwards: what was gathered last is still in the processor's cache.
            for at in reversed(range(lo, hi, BLOCK)):
                cut = slice(at, min(at + BLOCK, hi))
                for array, new in zip(self._vectors.values(), values, strict=True):
                    put(array, where[cut], new[cut])
                    self._point("redo block scattered")

        parallel.in_parts(where.size, scatter, SCATTERED)

    # ------------------------------------------------------------ commits

    def commit(self, state: Json) -> None:
        self._point("commit begun")
        self.catch_up()
        redo, current = self._redo, self._newest.current
        if self._is_dirty():
            current = 1 - current
        body = {"state": state, "updated": self._updated, "extras": self._extras_crc}
        self._write({**body, "sealed": None}, current, redo)
        self._point("commit written")
        if redo is not None:
            self._area, self._redo, self._put_off = redo.area, None, redo

    def catch_up(self) -> None:
        redo, self._put_off = self._put_off, None
        if redo is not None:
            self._scatter(redo.where, redo.values)
            self._point("commit scattered")

    def _write(self, body: Json, current: int, redo: _Redo | None = None) -> None:
        number = self._newest.number + 1
        commit = Commit(number, current, body)
        if redo is not None:
            count = redo.where.size
            total = self._areas[redo.area].total(count)
            commit = Commit(number, current, body, redo.area, count, total)
        data = image.pack_commit(self._form, commit)
        at, half = self._places[number % 2], len(data) // 2
        self._buffer[at : at + half] = data[:half]
        self._point("commit half written")
        self._buffer[at + half : at + len(data)] = data[half:]
        self._done[:] = number
        self._newest = commit

    def close(self) -> None:
        """Seal the state: commit it once more, with a checksum of everything."""
        self.catch_up()
        if self._redo is not None or self._is_dirty():
            return  # An update that was never committed; the last commit is what counts.
        current = self._newest.current
        body = {**self._newest.body, "sealed": self._form.vectors_crc(self._buffer, current)}
        self._write(body, current)
        self._point("state sealed")

    # ------------------------------------------------------------ another place

    @property
    def size_bytes(self) -> int:
        """Of the buffer that this state needs."""
        return self._form.total_bytes

    def move(self, buffer: Any) -> None:
        """Go on in another buffer of `size_bytes` bytes, with all that is in the present one.

        The header comes last, as in `create`. What was seen through `w`, `slots` and `extras`
        stays what it was. Of the old buffer nothing is needed any more.
        """
        self.catch_up()
        view, old = memoryview(buffer), self._buffer
        assert len(view) == len(old), f"{len(view)} bytes for {len(old)}"
        view[image.DONE_AT :] = old[image.DONE_AT :]
        self._point("state copied")
        view[: image.DONE_AT] = old[: image.DONE_AT]
        which = 0 if self._vectors is self._views[0] else 1
        self._use(buffer)
        self._vectors = self._views[which]
        redo = self._redo
        if redo is not None:
            _, values = self._areas[redo.area].cut(redo.where.size)
            self._redo = _Redo(redo.area, redo.where, values)


def _is_finite(array: Array) -> bool:
    parts = (array[lo : lo + BLOCK] for lo in range(0, array.size, BLOCK))
    return all(bool(np.isfinite(part).all()) for part in parts)
