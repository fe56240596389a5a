"""The variables by which the processes of a worker find each other, as torchrun sets them."""

from __future__ import annotations

from collections.abc import MutableMapping

HOST = "127.0.0.1"
"""All processes of a worker are on one host; their traffic does not leave it."""
OF_ALL = {
    "WORLD_SIZE": "{count}",
    "LOCAL_WORLD_SIZE": "{count}",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "{count}",
    "ROLE_NAME": "default",
    "MASTER_ADDR": HOST,
    "MASTER_PORT": "{port}",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "{run}",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OF_RANK = ("RANK", "LOCAL_RANK", "ROLE_RANK")


def begin(environment: MutableMapping[str, str], count: int, port: int, run: str) -> None:
    """For rank 0 of so many, which has the store at this port; later ranks inherit it."""
    for name, value in OF_ALL.items():
        environment[name] = value.format(count=count, port=port, run=run)
    be(environment, 0)


def be(environment: MutableMapping[str, str], rank: int) -> None:
    environment.update(dict.fromkeys(OF_RANK, str(rank)))


def leave(environment: MutableMapping[str, str]) -> None:
    """This process is in no group, whatever has started the run."""
    for name in (*OF_ALL, *OF_RANK):
        environment.pop(name, None)
