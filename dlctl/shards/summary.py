"""What workers see of a shard if they get 16 bits per value: `servers.fetch_values`.

Rounding alone would not accumulate errors, because fetched values are absolute and the shard keeps
the exact ones. But it would be biased. A worker would see the same number while the parameter moves
by less than its last bit, and the gradients of all workers would be taken at that same wrong point.
So there is error feedback: the rounding error of an element is added to it when it is rounded next,

    u = w + rest;  seen = round(u);  rest = u - seen

and the mean of the seen values deviates from the mean of the exact ones by a last bit divided by
the number of roundings (sigma-delta modulation; Tang et al., "DoubleSqueeze", ICML 2019, uses it in
the servers of SGD).

There is one summary per shard, not one per worker, and it is computed once per version, at the
first fetch of that version. So all answers of a server for a version agree, whole or of changes,
first or repeated; a version that no worker fetches costs nothing. An update of the summary rounds
the elements that changed since the version summarised last, or all if the history does not know
them. The summary of an earlier version that the history knows differs from this one only in
elements touched since.

A seen value differs from the exact one by at most half a last bit of the seen value plus half a
last bit of the one seen before. An untouched element keeps its error until it is touched again, or
a dense update arrives.

A value that does not fit ends the summary: from then on all workers get the exact parameters,
starting with all of them. Saturation would be an error that only grows. A replacement server starts
with a rest of 0; its term differs, so no worker mixes the two. Replicas that fetch a version
from both may differ by a last bit.
"""

from __future__ import annotations

import numpy as np

from dlctl.compress.values import LARGEST, Precision, take_values
from dlctl.model.vector import chosen
from dlctl.shards.base import Shard
from dlctl.util import threads
from dlctl.util.threads import BLOCK
from dlctl.wire.messages import Array

_DTYPES = {"float16": np.float16, "bfloat16": np.uint16}
"""The numpy types that these have on the wire (`compress/values.py`)."""
_NOTHING = np.empty(0, np.float32)


class Summary:
    def __init__(self, precision: Precision) -> None:
        self.precision: Precision = precision
        """The type of the values sent; "float32" once a value does not fit into the configured one.
        """
        self._version: int | None = None
        """The version summarised last; None: there was none."""
        self._forgotten = 0
        """`History.forgotten` at that version."""
        self._seen: Array = _NOTHING
        """[n], 16 bits each: what workers have seen last."""
        self._rest: Array = _NOTHING
        """float32[n], the rounding error of each."""

    def of(self, shard: Shard) -> Array:
        """The current version as workers see it: 16 bits [n], or the parameters, float32[n].

        A view, valid until the shard's next update.
        """
        if self.precision == "float32":
            return shard.w
        of = (shard.version, shard.history.forgotten)
        if (self._version, self._forgotten) != of and not self._advance(shard):
            self.precision, self._seen, self._rest = "float32", _NOTHING, _NOTHING
            # Workers have rounded values: exact changes on top of them would mix the two.
            shard.history.forget()
            return shard.w
        return self._seen

    def _advance(self, shard: Shard) -> bool:
        """Summarise the current version. Returns whether all values fit."""
        touched = None
        if self._version is None:
            self._rest = np.zeros(shard.size, np.float32)
            self._seen = np.empty(shard.size, _DTYPES[self.precision])
        else:
            is_known = self._forgotten == shard.history.forgotten
            touched = shard.history.touched(self._version, shard.version) if is_known else None
        self._version, self._forgotten = shard.version, shard.history.forgotten
        if touched is None:
            parts = threads.in_parts(shard.size, lambda lo, hi: self._round(shard.w, lo, hi))
            return all(parts)
        # In one call: else elements touched by two updates would be rounded twice.
        return self._round_at(shard.w, np.concatenate([np.empty(0, np.int64), *touched]))

    def _round(self, w: Array, lo: int, hi: int) -> bool:
        for at in range(lo, hi, BLOCK):
            cut = slice(at, min(at + BLOCK, hi))
            u = self._rest[cut]
            u += w[cut]
            if not self._fits(u):
                return False
            self._seen[cut] = take_values(u, self.precision)
        return True

    def _round_at(self, w: Array, where: Array) -> bool:
        """`where`: int64[n]; an element may be in it several times."""
        u = chosen(w, where) + chosen(self._rest, where)
        fits = self._fits(u)
        if fits:
            self._seen[where] = take_values(u, self.precision)
            self._rest[where] = u
        return fits

    def _fits(self, u: Array) -> bool:
        """Whether no value overflows. NaN does not fit either."""
        return bool(np.abs(u).max(initial=0.0) <= LARGEST[self.precision])
