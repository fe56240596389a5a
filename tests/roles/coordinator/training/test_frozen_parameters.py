"""Which worker keeps the frozen parameters, and who is told of them when."""

from __future__ import annotations

from typing import Any

import pytest

from dlctl.errors import DlctlError
from dlctl.model.flat import CONSTANT, TRAINED, Layout, TensorEntry
from dlctl.model.frozen import DIGEST_BYTES, run_file
from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.records import EventContext
from dlctl.roles.coordinator.training.frozen import FrozenParameters
from dlctl.roles.protocol.files import Transfers
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m

LAYOUT = Layout(
    (TensorEntry("w", TRAINED, (3,), "float32"), TensorEntry("base", CONSTANT, (4,), "bfloat16"))
)
OURS, THEIRS = b"a" * DIGEST_BYTES, b"b" * DIGEST_BYTES


class Run:
    """The part of a coordinator, with what it asks of the rest."""

    def __init__(self, before: Any = None) -> None:
        placed = dict.fromkeys(("worker-0", "worker-1"), HOME_AGENT)
        self.members = Membership([HOME_AGENT], placed, before={})
        self.context = EventContext(1.0)
        self.settled = 0
        self.ended: list[str] = []
        self.frozen = FrozenParameters(self, self, Transfers(self.context), before, self.settle)  # type: ignore[arg-type]

    def settle(self) -> None:
        self.settled += 1

    def end(self, state: str, reason: str, now: float, **_: Any) -> None:
        self.ended.append(reason)

    def ready(self, slot: int, digests: bytes, *, lacks: bool = False) -> None:
        name = f"worker-{slot}"
        message = m.ModelReady(name, LAYOUT.to_bytes(), 8, frozen=digests, lacks_weights=lacks)
        self.frozen.on_model(self.members.daemons[name], LAYOUT, message, 0.0)

    def asked(self) -> list[str]:
        """Who is to write the file, and has not answered."""
        return [peer for key, peer, *_ in self.context.retries.waiting() if key[0] == "frozen"]

    def kept(self, slot: int, digests: bytes, error: str = "") -> None:
        file = run_file(LAYOUT, digests)
        self.frozen.on_kept(b"", m.FrozenKept(f"worker-{slot}", file, "0" * 64, 99, error), 1.0)


def test_the_first_one_keeps_them_and_all_are_told_when_that_is_done() -> None:
    run = Run()
    run.ready(1, OURS)
    run.ready(0, THEIRS)
    assert run.asked() == ["worker-1"]
    assert run.frozen.to_send() is None
    run.kept(1, OURS)
    assert (run.frozen.to_send(), run.settled, run.asked()) == (OURS, 1, [])


def test_who_has_not_got_the_file_to_begin_with_keeps_nothing() -> None:
    run = Run()
    run.ready(1, THEIRS, lacks=True)
    assert run.asked() == []
    run.ready(0, OURS)
    assert run.asked() == ["worker-0"]


def test_another_one_keeps_its_own_if_the_first_one_dies() -> None:
    run = Run()
    run.ready(0, OURS)
    run.ready(1, THEIRS)
    run.frozen.on_gone("worker-0", 0.5)
    assert run.asked() == ["worker-1"]
    run.kept(0, OURS)
    assert run.frozen.to_send() is None
    run.kept(1, THEIRS)
    assert run.frozen.to_send() == THEIRS


def test_the_file_of_a_worker_that_dies_while_it_is_received_is_not_used() -> None:
    run = Run()
    run.members.daemons["worker-0"].agent = "agent-1"
    run.ready(0, OURS)
    run.kept(0, OURS)
    run.kept(0, OURS)  # Repeated: it is on its way already.
    sent = run.context.clear()
    assert sum(isinstance(getattr(e, "message", None), m.ReadFile) for e in sent) == 1
    run.frozen.on_gone("worker-0", 1.5)
    assert not run.frozen.transfers.is_busy()
    run.ready(1, THEIRS)
    run.kept(1, THEIRS)
    assert run.frozen.to_send() == THEIRS


def test_who_has_kept_them_may_die() -> None:
    run = Run()
    run.ready(0, OURS)
    run.ready(1, OURS)
    run.kept(0, OURS)
    run.frozen.on_gone("worker-0", 1.5)
    assert (run.frozen.to_send(), run.asked()) == (OURS, [])


def test_those_of_a_checkpoint_are_the_run_s_from_the_beginning() -> None:
    run = Run({"file": "x", "sha256": "0" * 64, "nbytes": 99, "digests": THEIRS.hex()})
    run.ready(0, OURS)
    assert (run.frozen.to_send(), run.asked()) == (THEIRS, [])


def test_what_cannot_be_kept_ends_the_run_and_what_does_not_fit_is_refused() -> None:
    run = Run()
    with pytest.raises(DlctlError, match="worker-0"):
        run.ready(0, b"")
    run.ready(0, OURS)
    run.kept(0, OURS, "disk full")
    assert run.ended == ["cannot keep the frozen parameters of the model: disk full"]
