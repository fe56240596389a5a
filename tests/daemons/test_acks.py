"""What a worker was told stays in writing, however the worker ends."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemons.worker.ack_record import Acks
from dlctl.errors import DlctlError
from dlctl.roles.protocol.effects import Settled
from dlctl.runs import acks

WRITER = """
import sys
from pathlib import Path
from daemons.worker.ack_record import Acks
from dlctl.roles.protocol.effects import Settled

record = Acks(Path(sys.argv[1]), "worker-0", 3, 2)
for count in range(1, 1 << 40):
    record.write(Settled(7, 0, count))
    print(count, flush=True)
    record.write(Settled(7, 1, count))
"""


def test_a_record_appears_with_the_first_push_that_is_settled(tmp_path: Path) -> None:
    record = Acks(tmp_path, "worker-4", 2, shards=3)
    assert acks.read_all(tmp_path) == []
    record.write(Settled(term=9, shard=1, count=1))
    record.write(Settled(term=9, shard=2, count=5))
    record.write(Settled(term=9, shard=1, count=2))
    assert acks.read_all(tmp_path) == [acks.AckRecord(4, 2, 9, (0, 2, 5))]


def test_every_incarnation_has_a_record_of_its_own(tmp_path: Path) -> None:
    for slot, incarnation in [(10, 1), (2, 2), (2, 1)]:
        Acks(tmp_path, f"worker-{slot}", incarnation, 1).write(Settled(1, 0, 1))
    found = [(record.slot, record.incarnation) for record in acks.read_all(tmp_path)]
    assert found == [(2, 1), (2, 2), (10, 1)]


def test_what_was_settled_survives_kill_9(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(50)][-1]
        writer.send_signal(signal.SIGKILL)
    (record,) = acks.read_all(tmp_path)
    assert (record.slot, record.incarnation, record.term) == (0, 3, 7)
    assert record.counts[0] >= acknowledged
    assert record.counts[0] - record.counts[1] in (0, 1)


def test_a_record_that_cannot_be_made_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "acks").write_text("a file is in the way")
    record = Acks(tmp_path, "worker-0", 1, 1)
    with caplog.at_level(logging.WARNING, "dlctl"):
        record.write(Settled(1, 0, 1))
        record.write(Settled(1, 0, 2))
    assert [line.getMessage()[:45] for line in caplog.records] == [
        "cannot record what the servers settle (" + str(tmp_path)[:6]
    ]


@pytest.mark.parametrize("size_bytes", [0, 1, 23, 24, 39, 41])
def test_a_record_that_is_cut_or_too_long_is_refused(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "worker-0.1"
    path.write_bytes((acks.blank(1, 2) + b"\0")[:size_bytes])
    with pytest.raises(DlctlError) as refused:
        acks.read(path)
    assert refused.value.where == str(path)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.1"
    path.write_bytes(acks.blank(1, 2).replace(b"ACKS1", b"ACKS2"))
    with pytest.raises(DlctlError):
        acks.read(path)
    with pytest.raises(DlctlError, match=os.strerror(errno.ENOENT)):
        acks.read(tmp_path / "worker-1.1")


def test_the_reader_needs_neither_numpy_nor_torch() -> None:
    code = "import sys, dlctl.runs.acks; print({'numpy', 'torch'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"
