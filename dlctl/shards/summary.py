"""What workers see of a shard if they get 16 bits per value: `servers.fetch_values`.

Rounding alone would do no lasting harm, because values are absolute and the shard keeps its own: no
error ever adds up. But it would be biased. A worker would go on to see the same number while the
parameter moves below the last bit of it, and the gradients of all workers would be of that one
point beside it. So there is error feedback: what the rounding took away of an element is added to
it when it is rounded next,

    u = w + rest;  seen = round(u);  rest = u - seen

and the mean of what is seen comes as near to the mean of what is there as a last bit divided by the
number of roundings (sigma-delta modulation; Tang et al., "DoubleSqueeze", ICML 2019, has it for the
servers of SGD).

There is one summary per shard and not one per worker, and it is made once per version, when the
first worker asks for that. So all answers of a server for a version agree, whole or of changes,
first or repeated; a version that nobody asks for costs nothing. Rounded is what has changed since
the version that was summed up last, and everything where the history does not say what that is. Who
has the summary of an earlier version, as the history knows it, differs from this one only in
elements that were touched since.

What is seen of an element differs from it by at most half a last bit of what is seen, and half a
last bit of what was seen before. An element that nobody touches keeps its error until it is touched
again, or a dense update comes.

A value that does not fit ends the summary: from then on everybody gets the parameters themselves,
and first all of them. To saturate would be an error that only grows. A server that comes after this
one begins with a rest of 0; its generation is another one, so nobody mixes the two. Replicas that
fetch one version of both may differ by a last bit.
"""

from __future__ import annotations

import numpy as np

from dlctl.compress.values import LARGEST, Precision, take_values
from dlctl.messages import Array
from dlctl.shards.base import Shard
from dlctl.util import threads
from dlctl.util.threads import BLOCK
from dlctl.vector import chosen

_DTYPES = {"float16": np.float16, "bfloat16": np.uint16}
"""As `compress/values.py` has them on the wire."""
_NOTHING = np.empty(0, np.float32)


class Summary:
    def __init__(self, precision: Precision) -> None:
        self.precision: Precision = precision
        """Of what is sent; "float32" as soon as a value does not fit into what was asked for."""
        self._version: int | None = None
        """That has been summed up last; None: there was none."""
        self._forgotten = 0
        """How often the history had been forgotten then."""
        self._seen: Array = _NOTHING
        """16 bits [n]"""
        self._rest: Array = _NOTHING
        """float32[n], what the rounding has taken away of each."""

    def of(self, shard: Shard) -> Array:
        """What workers see of the present version: 16 bits [n], or the parameters, float32[n].

        A view, valid until the shard's next update.
        """
        if self.precision == "float32":
            return shard.w
        of = (shard.version, shard.history.forgotten)
        if (self._version, self._forgotten) != of and not self._advance(shard):
            self.precision, self._seen, self._rest = "float32", _NOTHING, _NOTHING
            # What others have was rounded: to put exact changes on it would mix the two.
            shard.history.forget()
            return shard.w
        return self._seen

    def _advance(self, shard: Shard) -> bool:
        """Sum up the present version. Returns whether all of it fits."""
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
        # At once, or what two updates have touched would be rounded twice.
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
        """Whether nothing would be cut off. NaN does not fit either."""
        return bool(np.abs(u).max(initial=0.0) <= LARGEST[self.precision])
