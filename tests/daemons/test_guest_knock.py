"""`dlctl join` knocks at a run that has begun to listen, but does not know yet whom it admits."""

from __future__ import annotations

import threading

import pytest
from guarded_port import GUEST, HERE, KEYS, House

from daemons.guest import knock
from daemons.transport import zap
from dlctl.control.invitation import InvitationFile
from dlctl.errors import Unreachable

NAMES = {KEYS.public(GUEST): GUEST}


def made(house: House) -> InvitationFile:
    return InvitationFile(
        "run-1", GUEST, GUEST, house.address, KEYS.public(HERE), KEYS.secret(GUEST), 0.0, "", ""
    )


def test_a_run_that_does_not_admit_anybody_yet_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zap, "UNDECIDED_S", 0.05)
    monkeypatch.setattr(knock, "FOREIGN_S", 0.2)
    house = House(None)
    later = threading.Timer(1.0, house.transport.admit, [NAMES])
    try:
        later.start()
        knock.knock(made(house), house.address)
        assert house.transport.gatekeeper is not None
        assert house.transport.gatekeeper.refused > 0
    finally:
        later.join()
        house.transport.close()


def test_one_that_never_does_is_no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zap, "UNDECIDED_S", 0.05)
    monkeypatch.setattr(knock, "ANSWER_S", 1.0)
    house = House(None)
    try:
        with pytest.raises(Unreachable):
            knock.knock(made(house), house.address)
    finally:
        house.transport.close()
