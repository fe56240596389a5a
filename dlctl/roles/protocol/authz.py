"""Authorization: which peers may connect to a daemon, and which messages each may send.

The transport derives a connection's identity from its key. A daemon sends messages about itself
only, an agent also about the processes that it supervises, and a client sends requests. A guest
(`dlctl join`) is an agent of one worker, which has its number. An unauthorized message is refused;
after the third one the sender's key is revoked, since it is stolen or its process has been
replaced. (Removing a key does not close an open connection, so every message is checked.)

Without keys (identity "") every peer that can reach the socket is this user, and is trusted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from dlctl.errors import NotPermitted, RemoteProtocolError
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import Admit

CLIENT = "client"
"""The command line: any process that can read the key in the run directory."""
READER = "reader"
"""A read-only observer: `dlctl keys reader`."""
READABLE = frozenset({"status"})
"""The requests that change nothing."""
COME_LATER = 500
"""A listener's status code for a peer that it may admit soon. RFC 27 defines 300 for that, but
libzmq does not report 300 to the peer, and may hold the connection until the handshake times out.
"""
OFFENCES_MAX = 3
WORKER, SERVER, AGENT, GUEST = "worker", "server", "agent", "guest"


_SENDERS: tuple[tuple[tuple[str, ...], str, tuple[type[m.Message], ...]], ...] = (
    ((WORKER, SERVER, AGENT), "{0.name}", (m.Register, m.Report, m.Changed, m.Failed)),
    ((GUEST,), "{0.name}", (m.Register, m.Report, m.WantSlot, m.Leaving, m.FileData)),
    ((WORKER, SERVER), "{0.name}", (m.Saved, m.Noted)),
    ((WORKER, SERVER), "", (m.ReadFile,)),
    ((WORKER,), "{0.name}", (m.ModelReady, m.FrozenKept, m.Evaluated, m.Drained, m.GroupNoted)),
    ((WORKER,), "worker-{0.slot}", (
        m.Listening, m.LeaseRequest, m.PortionDone, m.SampleFailed, m.Join, m.Initialise,
        m.Push, m.Fetch, m.FetchRows, m.PushBuffers, m.FetchBuffers, m.GroupBroken, m.PeerRequest,
    )),
    ((SERVER,), "{0.name}", (m.Serving,)),
    ((SERVER,), "server-{0.shard}", (m.VectorResult, m.Holding, m.NormPart)),
    ((AGENT,), "{0.name}", (m.FileData,)),
    ((AGENT, GUEST), "", (m.Spawned, m.ProcessExited)),
    ((CLIENT, READER), "", (m.Request,)),
)  # fmt: skip
"""(Roles, the daemon that their messages are about ("": any), the messages). No other messages are
sent to a daemon that listens."""
_RULES: dict[type[m.Message], dict[str, str]] = {}
for _roles, _about, _kinds in _SENDERS:
    for _kind in _kinds:
        _RULES.setdefault(_kind, {}).update(dict.fromkeys(_roles, _about))


def offence(identity: str, message: m.Message) -> str:
    """Why `identity` may not send this message; "" if it may."""
    if not identity:
        return ""
    role, _, number = identity.partition("-")
    about = _RULES.get(type(message), {}).get(role)
    if about is None:
        return f"{identity} may not send {type(message).__name__}"
    if role == GUEST and isinstance(message, m.Spawned | m.ProcessExited):
        theirs = message.name in (identity, f"{WORKER}-{number}")
        return "" if theirs else f"{identity} speaks for {message.name!s:.40}"
    claimed = about.format(message)
    return f"{identity} speaks for {claimed:.40}" if claimed not in ("", identity) else ""


class Authz:
    """The keys that are admitted, and those that are revoked."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._offences: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self._admitted: frozenset[str] = frozenset()

    def admit(self, names: dict[str, str]) -> None:
        """Set the admitted keys: public key -> name. No effect if they are unchanged."""
        if names != self._names:
            self._names = names
            self._apply()

    def check(self, identity: str, message: m.Message) -> None:
        """Raises RemoteProtocolError if this message is not authorized, and NotPermitted if a
        reader sends a request that is not read-only, which is no offence.
        """
        if identity == READER and isinstance(message, m.Request) and message.verb not in READABLE:
            raise NotPermitted(f'a reader may not ask for "{message.verb:.40}"')
        if identity and identity not in self._admitted:
            raise RemoteProtocolError(f"{identity} is not admitted any more")
        reason = offence(identity, message)
        if reason:
            self._offences[identity] += 1
            if self._is_revoked(identity):
                text = f"{identity} sent {OFFENCES_MAX} unauthorized messages: its key is revoked"
                self.context.note("error", text)
                self._apply()
            raise RemoteProtocolError(reason)

    def may(self, identity: str, message: m.Message) -> bool:
        """Whether a daemon may send this message; without effect if not."""
        is_in = not identity or identity in self._admitted
        return is_in and not offence(identity, message)

    def _is_revoked(self, identity: str) -> bool:
        return self._offences[identity] >= OFFENCES_MAX

    def _apply(self) -> None:
        names = {key: name for key, name in self._names.items() if not self._is_revoked(name)}
        self._admitted = frozenset(names.values())
        self.context.do(Admit(names))


def allowed_peers_in(data: bytes) -> dict[str, str]:
    """Public key -> name, as `AllowedPeers` carries it. Raises RemoteProtocolError."""
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if type(names) is not dict or not all(type(name) is str for name in names.values()):
        raise RemoteProtocolError("it is not a table of allowed peers")
    return names


def keys_of(
    keyring: Keyring, names: Iterable[str], derived: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Public key -> name; {} if the connections of this run have no keys. derived: name -> what its
    keys are derived from, if that is not the name.
    """
    found = {keyring.public(derived.get(name, name)): name for name in names}
    return {} if "" in found else found
