"""What an optimiser keeps beside matrices is as durable as the parameters: in every storage, and
whenever the server is killed.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import msgpack
import pytest
from kept_states import BOOT, Killed, bytes_for
from matrix_shards import NAMES, placed, push, snapshot, spec_of

from dlctl.optim.matrices import MatrixOptimizer
from dlctl.shards import image
from dlctl.shards.base import Shard, no_point
from dlctl.shards.errors import Unusable
from dlctl.shards.journaled import Journaled
from dlctl.shards.mapped import Mapped
from dlctl.sim.states import MemoryLog

EVERY = pytest.mark.parametrize("name", NAMES)


class At:
    """Kills at the n-th point that is passed."""

    def __init__(self, last: int) -> None:
        self.left = last

    def __call__(self, point: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed(point)


def train(shard: Shard, count: int) -> list[dict[str, Any]]:
    """The states of all commits."""
    found = [snapshot(shard)]
    for number in range(count):
        shard.apply(push(number))
        found.append(snapshot(shard))
        shard.commit({})
    return found


@EVERY
def test_a_mapped_state_is_that_of_a_commit_wherever_it_is_killed(name: str) -> None:
    spec = spec_of(placed(name))
    whole = Shard(placed(name), Mapped.create(bytes_for(spec), spec, BOOT))
    states = train(whole, 4)
    kills = 0
    for last in range(200):
        buffer = bytes_for(spec)
        shard = Shard(placed(name), Mapped.create(buffer, spec, BOOT))
        shard.storage._point = At(last)
        try:
            train(shard, 4)
        except Killed:
            kills += 1
        else:
            break
        found = Shard(placed(name), Mapped.reopen(buffer, spec, BOOT))
        found.resume()
        assert snapshot(found) == states[found.version]
        assert found.version in (shard.version, shard.version - 1, shard.version + 1)
        for number in range(found.version, 4):
            found.apply(push(number))
            found.commit({})
        assert snapshot(found) == states[-1]
    assert kills > 10


@EVERY
def test_a_journal_has_results_and_computes_nothing_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of matrices are rounded differently by other processors and numbers of threads."""
    spec, log = spec_of(placed(name)), MemoryLog()
    shard = Shard(placed(name), Journaled.create(log, spec, no_point, 1 << 20))
    states = train(shard, 5)
    assert len(log.files[log.current][1]) > 5 * spec.vector_bytes, "five records, and no base"

    def computes(self: MatrixOptimizer) -> Any:
        raise AssertionError("an update is made again")

    with monkeypatch.context() as patch:
        patch.setattr(MatrixOptimizer, "begin_update", computes)
        found = Shard(placed(name), Journaled(log, spec, no_point, 1 << 20))
        found.resume()
    assert snapshot(found) == states[-1]
    found.apply(push(5))
    shard.apply(push(5))
    assert snapshot(found) == snapshot(shard)


@pytest.mark.parametrize("how", ["mapped", "journal"])
def test_a_state_with_other_matrices_is_not_used(how: str) -> None:
    soap, shampoo = (spec_of(placed(name)) for name in ("soap", "shampoo"))
    other = placed("shampoo")
    if how == "mapped":
        buffer = bytes_for(soap)
        Mapped.create(buffer, soap, BOOT)
        with pytest.raises(Unusable):
            Mapped.reopen(buffer, shampoo, BOOT)
    else:
        log = MemoryLog()
        Journaled.create(log, soap)
        with pytest.raises(Unusable):
            Journaled(log, shampoo).resume(other)


def test_a_header_of_before_there_were_matrices_is_read() -> None:
    """The state of a server of an earlier version has no such key."""
    spec = dataclasses.replace(spec_of(placed("soap")), kept=None)
    buffer = bytes_for(spec)
    Mapped.create(buffer, spec, BOOT)
    length = image._HEADER.unpack_from(buffer)[2]
    body = msgpack.unpackb(buffer[image._HEADER.size : image._HEADER.size + length])
    assert body.pop("kept") == {}
    earlier = msgpack.packb(body)
    header = image._HEADER.pack(image.MAGIC, zlib.crc32(earlier), len(earlier)) + earlier
    buffer[: len(header)] = header
    assert image.read_header(buffer).kept == {}
    assert Mapped.reopen(buffer, spec, BOOT).w.size == spec.size
