"""The run key on the disk, and the keys that are derived from it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import zmq

from dlctl.control import keys
from dlctl.errors import DlctlError

RUN_KEY = bytes(range(32))


def write(directory: Path, data: bytes = RUN_KEY, mode: int = 0o600) -> Path:
    path = directory / keys.FILE
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_every_name_has_a_pair_of_its_own_and_always_the_same(tmp_path):
    write(tmp_path)
    ring, again = (keys.keyring(tmp_path, is_encrypted=True) for _ in range(2))
    names = ("coordinator", "client", "agent-0", "server-0", "worker-0", "worker-1")
    publics = [ring.public(name) for name in names]
    assert publics == [again.public(name) for name in names]
    assert len({*publics, *(ring.secret(name) for name in names)}) == 2 * len(names)
    for name in names:
        assert zmq.curve_public(ring.secret(name).encode()).decode() == ring.public(name)
        assert len(ring.secret(name)) == keys.KEY_LETTERS


def test_another_run_has_other_keys():
    one, other = keys.CurveKeys(RUN_KEY), keys.CurveKeys(RUN_KEY[::-1])
    assert one.public("server-0") != other.public("server-0")
    assert one.token_key != other.token_key
    assert one.token_key != RUN_KEY


def test_without_encryption_only_tokens_are_signed(tmp_path):
    write(tmp_path)
    ring = keys.keyring(tmp_path, is_encrypted=False)
    assert ring.public("server-0") == ring.secret("server-0") == ""
    assert ring.token_key == keys.keyring(tmp_path, is_encrypted=True).token_key


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path, mode):
    path = write(tmp_path, mode=mode)
    with pytest.raises(
        DlctlError, match=rf"others may read the run's key \(mode {mode:04o}\)"
    ) as raised:
        keys.read(tmp_path)
    assert raised.value.where == str(path)
    assert f"chmod 600 {path}" in (raised.value.hint or "")


@pytest.mark.parametrize("data", [b"", RUN_KEY[:31], RUN_KEY + b"\n", RUN_KEY.hex().encode()])
def test_a_key_of_another_length_is_refused_and_never_shown(tmp_path, data):
    write(tmp_path, data)
    with pytest.raises(DlctlError, match="32 bytes") as raised:
        keys.read(tmp_path)
    assert data[:4] not in str(raised.value).encode() or not data


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_key_of_somebody_else_is_refused(tmp_path):
    os.chown(write(tmp_path), 65534, 65534)
    with pytest.raises(DlctlError, match=r"\(uid 65534\)"):
        keys.read(tmp_path)


def test_a_key_behind_a_link_is_refused(tmp_path):
    (tmp_path / keys.FILE).symlink_to(write(tmp_path / ".").rename(tmp_path / "elsewhere"))
    with pytest.raises(DlctlError):
        keys.read(tmp_path)


def test_a_key_that_is_a_directory_or_not_there_is_named(tmp_path):
    with pytest.raises(DlctlError, match=os.strerror(errno.ENOENT)):
        keys.read(tmp_path)
    (tmp_path / keys.FILE).mkdir()
    with pytest.raises(DlctlError, match="directory"):
        keys.read(tmp_path)
