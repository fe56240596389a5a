"""What is at an address is downloaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

import dlctl
from dlctl.errors import DlctlError, NotFound
from dlctl.stores import fetching
from dlctl.stores.fetching import WEIGHTS


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store" / "base"
    (place / "more").mkdir(parents=True)
    for name in ("a.safetensors", "b.safetensors", "notes.txt", "more/c.safetensors"):
        (place / name).write_text(name)
    return place


def test_a_file_or_a_directory_comes_once(store: Path, tmp_path: Path) -> None:
    one, all_ = f"file://{store}/a.safetensors", f"file://{store}"
    path = fetching.fetched_into(one, tmp_path / "here", WEIGHTS)
    assert (path.name, path.read_text()) == ("a.safetensors", "a.safetensors")
    folder = fetching.fetched_into(all_, tmp_path / "here", WEIGHTS)
    assert sorted(p.name for p in folder.iterdir()) == ["a.safetensors", "b.safetensors"]
    whole = fetching.fetched_into(all_, tmp_path / "other")
    assert (whole / "more" / "c.safetensors").read_text() == "more/c.safetensors"
    (store / "a.safetensors").unlink()
    assert fetching.fetched_into(one, tmp_path / "here", WEIGHTS) == path


def test_what_is_not_there_is_not_found_and_leaves_nothing(store: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        fetching.fetched_into(f"file://{store}/x", tmp_path / "here")
    with pytest.raises(NotFound):
        fetching.fetched_into(f"file://{store.parent}", tmp_path / "here", WEIGHTS)
    assert [p.suffix for p in (tmp_path / "here").iterdir() if p.is_dir()] == []


def test_a_download_that_breaks_off_begins_again(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{store}/a.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_found", lambda *_: (Short(), {"a.safetensors": 9}))
        with pytest.raises(DlctlError, match="3 bytes instead of 9"):
            fetching.fetched_into(address, tmp_path / "here")
    assert fetching.fetched_into(address, tmp_path / "here").read_text() == "a.safetensors"


class Short:
    address = "file:///elsewhere"

    def pieces(self, name: str) -> list[bytes]:
        return [b"abc"]


@pytest.mark.parametrize("name", ["../../out", "/out", "a/./b", "a//b"])
def test_a_name_that_leads_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The keys of an object store are any text."""
    monkeypatch.setattr(fetching, "_found", lambda *_: (Short(), {name: 3}))
    with pytest.raises(DlctlError, match="no name for a file"):
        fetching.fetched_into("s3://bucket/x", tmp_path / "here")
    assert not list(tmp_path.rglob("out"))


def test_a_task_gets_a_path_for_an_address_and_for_a_path(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert dlctl.fetched("data/x") == Path("data/x")
    found = dlctl.fetched(f"file://{store}/notes.txt")
    assert found.read_text() == "notes.txt"
    assert found.is_relative_to(tmp_path / "cache" / "dlctl")
