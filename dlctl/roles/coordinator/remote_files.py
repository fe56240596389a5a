"""Files of other hosts, as the coordinator deals with them: checkpoints out and back, and logs."""

from __future__ import annotations

from dlctl import messages as m
from dlctl.machine import Peer
from dlctl.roles.coordinator.membership import Membership
from dlctl.roles.coordinator.mirror import LogMirror
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.transfers import Transfers
from dlctl.roles.protocol.travelling import (
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

    def __init__(self, context: Context, members: Membership) -> None:
        self.context = context
        self.transfers = Transfers(context)
        self.mirror = LogMirror(context, members)

    def on_event(
        self, event: BytesRead | FileSealed | StillReading | MirrorFailed, now: float
    ) -> None:
        match event:
            case BytesRead(peer, answer):
                self.context.send(peer, answer)
            case FileSealed():
                self.transfers.on_sealed(event, now)
            case StillReading():
                self.transfers.on_reading(now)
            case MirrorFailed():
                self.mirror.on_failed(event)

    def on_question(self, peer: Peer, question: m.ReadFile) -> None:
        """Of a server or worker that goes on from a checkpoint."""
        self.context.do(ReadBytes(peer, question))

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
