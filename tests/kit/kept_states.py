"""What the tests of kept states share: a plain model of a shard, and deltas for it."""

import numpy as np

from dlctl.compress.base import Delta
from dlctl.optim.adagrad import Adagrad
from dlctl.shards.base import Shard, Spec
from dlctl.shards.image import ImageForm
from dlctl.shards.mapped import Mapped, no_point
from dlctl.shards.memory import InMemory

BOOT = "the present boot"


class Killed(BaseException):
    """The process is gone in the middle of something."""


def adagrad():
    return Adagrad(Adagrad.Options(lr=0.5, initial_accumulator=0.1))


def spec_of(optimizer, size, **changes):
    values = {"run_id": "run-1", "shard": 0, "lo": 10, "hi": 10 + size, "workers": 2}
    return Spec(**(values | {"slots": optimizer.slots} | changes))


def bytes_for(spec):
    return bytearray(ImageForm.of(spec, BOOT).total_bytes)


def created(optimizer, spec, point=no_point):
    """(a buffer, a new mapped shard in it)"""
    buffer = bytes_for(spec)
    return buffer, Shard(optimizer, Mapped.create(buffer, spec, BOOT, point))


def reopened(buffer, optimizer, spec, point=no_point):
    """(the shard that the next process finds in a buffer, the meta of its last commit)"""
    shard = Shard(optimizer, Mapped.reopen(buffer, spec, BOOT, point))
    return shard, shard.resume()


def plain(optimizer, spec):
    return Shard(optimizer, InMemory().create(spec))


def snapshot(shard):
    """Everything that a shard consists of, to be compared to the last bit."""
    vectors = {"w": shard.w, **shard.slots}
    return {
        "vectors": {name: array.tobytes() for name, array in vectors.items()},
        "version": shard.version,
        "lr": shard.optimizer.lr,
        "counters": dict(shard.optimizer.counters),
    }


def dense(seed, size):
    return Delta(np.random.default_rng(seed).standard_normal(size).astype(np.float32))


def sparse(seed, size, count):
    rng = np.random.default_rng(seed)
    where = np.sort(rng.choice(size, count, replace=False)).astype(np.int64)
    return Delta(rng.standard_normal(count).astype(np.float32), where)
