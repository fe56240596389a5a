"""Addresses of stores: what is one, what is wrong with one, and that none becomes a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.errors import UsageError
from dlctl.job.config import JobFile
from dlctl.stores import addresses
from dlctl.util import extras, values


@pytest.mark.parametrize(
    ("text", "scheme", "bucket", "key"),
    [
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://bucket/", "s3", "bucket", ""),
        ("s3://my.bucket/a b"[:-2], "s3", "my.bucket", "a"),
        ("gs://bucket/a/b-c/", "gs", "bucket", "a/b-c"),
        ("file:///mnt/store", "file", "", "/mnt/store"),
    ],
)
def test_an_address_is_text_that_comes_back(text: str, scheme: str, bucket: str, key: str) -> None:
    """PL#21779: "gs://" must not become "gs:/"."""
    found = addresses.parse(text)
    assert (found.scheme, found.bucket, found.key) == (scheme, bucket, key)
    assert str(found) == text.rstrip("/")
    assert addresses.is_like(text)
    assert values.path(text) == text
    assert addresses.located(text, Path("/home")) == text


def test_the_parts_above_and_below_make_it_up() -> None:
    above, name = addresses.parse("s3://bucket/a/b").split()
    assert (str(above), name) == ("s3://bucket/a", "b")
    assert addresses.parse("s3://bucket").split()[1] == ""


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("bucket/prefix", 's3://bucket/prefix"'),
        ("/mnt/store", 'file:///mnt/store"'),
        ("gs:/bucket/x", 'gs://bucket/x"'),
        ("s3:bucket/x", 's3://bucket/x"'),
        ("s3//bucket/x", '"s3://bucket/x"'),
        ("S3://bucket/x", 's3://bucket/x"'),
        ("file:/mnt/x", 'file:///mnt/x"'),
        ("file://mnt/x", 'file:///mnt/x"'),
        ("s4://bucket/x", "known: s3, gs, file"),
        ("gcs://bucket/x", '"gs"'),
        ("http://host/x", "known: s3, gs, file"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///x", "s3://bucket/prefix"),
        ("file:///", "file:///mnt"),
        ("s3://bucket/a//b", ""),
        ("s3://bucket/../x", ""),
        ("s3://bucket/x?versionId=3", ""),
        ("s3://bucket/a b", ""),
        ("s3://bucket/a\nb", ""),
        ("s3://bucket/" + "x" * 1000, ""),
        ("s3://me:s3cr3t@bucket/x", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_is_none_is_refused_with_what_was_meant(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        addresses.parse(text)
    assert hint in (caught.value.hint or "")
    assert "s3cr3t" not in f"{caught.value.message}{caught.value.hint}"


def load(tmp_path: Path, line: str) -> JobFile:
    (tmp_path / "train.py").write_text("task = 1\n")
    head = '[job]\nname = "digits"\ntask = "train.py:task"\n'
    (tmp_path / "job.toml").write_text(head + line)
    return jobfile.load(tmp_path / "job.toml")


def test_a_job_file_has_addresses_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_there", lambda extra: True)
    mirror = "gs://bucket/{run}"
    found = load(tmp_path, f'weights = "s3://bucket/w"\n[checkpoints]\nmirror = "{mirror}"\n')
    assert (found.job.weights, found.checkpoints.mirror) == ("s3://bucket/w", mirror)


@pytest.mark.parametrize(
    ("line", "key", "hint"),
    [
        ('[checkpoints]\nmirror = "bucket/x"\n', "mirror", "s3://bucket/x"),
        ('[checkpoints]\nmirror = "s3://bucket/x"\n', "mirror", "pip install 'dlctl[s3]'"),
        ('weights = "gs:/bucket/w"\n', "weights", "gs://bucket/w"),
    ],
)
def test_a_wrong_address_in_a_job_file_is_a_fault_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, key: str, hint: str
) -> None:
    monkeypatch.setattr(extras, "is_there", lambda extra: False)
    with pytest.raises(UsageError) as caught:
        load(tmp_path, line)
    assert key in str(caught.value)
    assert hint in f"{caught.value.message}{caught.value.hint}"
