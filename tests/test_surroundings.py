"""A test that leaves variables or signals changed fails, and those after it meet what there was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from surroundings import Surroundings


def set_a_variable() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def change_one() -> None:
    os.environ["THERE"] = "other"


def remove_one() -> None:
    del os.environ["THERE"]


def ignore_a_signal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def block_a_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the code under test does, this file leaves all as it was."""
    before = Surroundings.now()
    monkeypatch.setenv("THERE", "this")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Under nohup it is ignored.
    yield
    before.restore(Surroundings.now())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (set_a_variable, "LEFT_BEHIND"), (change_one, "THERE"), (remove_one, "THERE"),
        (ignore_a_signal, "SIGHUP"), (block_a_signal, "SIGTERM"),
    ],
)  # fmt: skip
def test_a_change_is_named_and_undone(change: Callable[[], None], name: str) -> None:
    before = Surroundings.now()
    assert before.left_changed(Surroundings.now()) == []
    change()
    (found,) = before.left_changed(Surroundings.now())
    assert name in found
    before.restore(Surroundings.now())
    assert before.left_changed(Surroundings.now()) == []


def test_what_torch_sets_is_nobody_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Surroundings.now()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    assert before.left_changed(Surroundings.now()) == []


def test_a_test_that_leaves_one_fails(request: pytest.FixtureRequest) -> None:
    """By the hook of all tests, which is called for this one."""
    path = request.config.rootpath / "tests/conftest.py"
    hook = request.config.pluginmanager.get_plugin(str(path))
    assert hook is not None
    set_a_variable()
    ending = hook.pytest_runtest_teardown(request.node)
    next(ending)
    with pytest.raises(pytest.fail.Exception, match="LEFT_BEHIND"):
        next(ending)
    assert "LEFT_BEHIND" not in os.environ
