"""Files of other hosts, as the coordinator deals with them: checkpoints out and back, and logs."""

from __future__ import annotations

from dlctl import messages as m
from dlctl.machine import Peer
from dlctl.roles.desk import Desk
from dlctl.roles.membership import Membership
from dlctl.roles.mirror import Mirror
from dlctl.roles.transfers import Transfers
from dlctl.roles.travelling import (
    CHECKPOINTS,
    BytesRead,
    FileSealed,
    MirrorFailed,
    ReadBytes,
    StillReading,
)


class HostFiles:
    """`transfers` fetches what hosts have saved, `mirror` copies their logs; daemons on other hosts
    read the files of checkpoints here.
    """

    def __init__(self, desk: Desk, members: Membership) -> None:
        self.desk = desk
        self.transfers = Transfers(desk)
        self.mirror = Mirror(desk, members)

    def on_event(
        self, event: BytesRead | FileSealed | StillReading | MirrorFailed, now: float
    ) -> None:
        match event:
            case BytesRead(peer, answer):
                self.desk.send(peer, answer)
            case FileSealed():
                self.transfers.on_sealed(event, now)
            case StillReading():
                self.transfers.on_reading(now)
            case MirrorFailed():
                self.mirror.on_failed(event)

    def on_question(self, peer: Peer, question: m.ReadFile) -> None:
        """Of a server or worker that goes on from a checkpoint."""
        self.desk.do(ReadBytes(peer, question))

    def on_data(self, message: m.FileData, now: float) -> None:
        """Raises RemoteProtocolError if it comes from a host that was not asked for it."""
        if message.file.startswith(CHECKPOINTS):
            self.transfers.on_data(message, now)
        else:
            self.mirror.on_data(message, now)

    def lose(self, agent: str, why: str, now: float) -> None:
        """A host is given up."""
        self.transfers.fail_all(agent, why, now)
        self.mirror.lose(agent)

    def deadlines(self) -> list[float | None]:
        return [self.transfers.deadline(), self.mirror.deadline()]

    def on_deadline(self, now: float) -> None:
        self.transfers.on_deadline(now)
        self.mirror.on_deadline(now)
