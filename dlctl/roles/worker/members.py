"""The replicas of the run, as the coordinator lists them, and the connections between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlctl.errors import RemoteProtocolError
from dlctl.roles.protocol.authz import Authz
from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.wire import messages as m
from dlctl.wire.machine import Connect


@dataclass(frozen=True, slots=True)
class Member:
    """A replica in the coordinator's list of members."""

    term: int
    address: str
    """The address at which the replica answers requests; "" while it does not listen."""
    key: str
    takes_part: bool


class PeerMembers:
    """The replicas of the run, and the connections to them."""

    def __init__(self, context: Context, name: str, *, connects: bool) -> None:
        """name: this daemon's. connects: whether replicas ask each other."""
        self.context = context
        self.name = name
        self.connects = connects
        self.authz = Authz(context)
        self.number = 0
        """The number of the newest list of members."""
        self.known: dict[int, Member] = {}

    @property
    def slots(self) -> frozenset[int]:
        """The slots that take part."""
        return frozenset(slot for slot, member in self.known.items() if member.takes_part)

    def has(self, slot: int, term: int) -> bool:
        """Whether this process of the slot takes part, or is joining."""
        return slot in self.known and self.known[slot].term == term

    def is_replaced(self, slot: int, term: int) -> bool:
        """Whether the slot has a newer process."""
        return slot in self.known and self.known[slot].term > term

    def on_peers(self, message: m.Peers, own_slot: int) -> bool:
        """Take a list of members; a stale or duplicate one is ignored. Returns whether it is new.

        Raises RemoteProtocolError if it is inconsistent.
        """
        columns = (message.slots, message.terms, message.addresses, message.keys)
        if len({len(column) for column in columns}) != 1:
            raise RemoteProtocolError("its columns differ in length")
        self.context.send(COORDINATOR, m.Noted(self.name, "peers", message.number))
        if message.number <= self.number:
            return False
        self.number, before = message.number, self.known
        self.known = {
            slot: Member(term, address, key, slot not in message.joining)
            for slot, term, address, key in zip(*columns, strict=True)
        }
        if self.connects:
            self._connect(before, own_slot)
        return True

    def _connect(self, before: dict[int, Member], own_slot: int) -> None:
        others = {slot: member for slot, member in self.known.items() if slot != own_slot}
        keys = {member.key: f"worker-{slot}" for slot, member in others.items()}
        if "" not in keys:
            self.authz.admit(keys)
        for slot, member in others.items():
            known = before.get(slot)
            if known is not None:
                known = replace(known, takes_part=member.takes_part)
            if member.address and member != known:
                self.context.do(Connect(f"worker-{slot}", member.address, member.key))
