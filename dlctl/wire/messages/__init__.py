"""Every message of a run, one frozen dataclass each.

The control plane is between the coordinator and all other processes; the data plane between workers
and servers. Field types are the schema: `codec.py` reads them, checks each received value, and
sends arrays as separate raw frames after the header. Vectors are 1-d; units are the last part of
names.

Identity: a worker is (slot, term), a server is (shard, term). A term is a fencing token: the
coordinator issues each once per slot or shard. `token` proves to a server that the coordinator has
issued a worker's term. A push is (slot, term, shard, seq) with seq dense from 0.
"""

from __future__ import annotations

from types import ModuleType

from dlctl.wire.messages import control, data, files
from dlctl.wire.messages.base import *  # noqa: F403
from dlctl.wire.messages.base import Message
from dlctl.wire.messages.control import *  # noqa: F403
from dlctl.wire.messages.data import *  # noqa: F403
from dlctl.wire.messages.files import *  # noqa: F403

FIRST_CODE = {control: 0, files: 96, data: 128}


def _numbered(module: ModuleType, first: int) -> dict[int, type[Message]]:
    """Wire codes follow the order in the file: append to it, or raise `wire.PROTOCOL`."""
    kinds: list[type[Message]] = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Message)
        and kind.__module__ == module.__name__
    ]
    numbered = dict(enumerate(kinds, first))
    for code, kind in numbered.items():
        kind.code = code
    return numbered


MESSAGES: dict[int, type[Message]] = {
    code: kind
    for module, first in FIRST_CODE.items()
    for code, kind in _numbered(module, first).items()
}
