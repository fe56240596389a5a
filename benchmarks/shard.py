"""A real server process, started as in production, with a minimal coordinator and worker.

This process acts as the coordinator until the server owns a shard, then as the only worker, which
joins, pushes and fetches. It uses the daemons' transport and wire format, but does not retry,
because no message is lost here.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import zmq

from daemons.transport.sockets import Transport
from dlctl.control import keys
from dlctl.job import config
from dlctl.launch import addresses, local
from dlctl.launch.base import Credentials
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.protocol.authz import keys_of
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.keyring import Keyring
from dlctl.roles.protocol.token import sign
from dlctl.roles.worker.received_slice import Basis, answer_bytes, slice_in
from dlctl.runs import kept_shards, paths
from dlctl.wire import messages as m
from dlctl.wire.machine import Peer

ANSWER_LIMIT_MS = 60_000
TERM, SHARD_TERM = 1, 1
SERVER = "server-0"
NETWORKS = {
    "ipc": config.Network(),
    "tcp": config.Network(transport="tcp", encryption="none"),
    "curve": config.Network(transport="tcp"),
}
M = TypeVar("M", bound=m.Message)


class End:
    """One end of the daemons' transport."""

    def __init__(self, secret: str = "") -> None:
        self.poller = zmq.Poller()
        self.transport = Transport(self.poller, secret)

    def wait_for(self, *kinds: type[M]) -> tuple[Peer, M]:
        """The next message of one of these kinds; others are dropped. Raises TimeoutError."""
        self.transport.bulk.give_back()
        while ready := self.poller.poll(ANSWER_LIMIT_MS):
            for socket, _ in ready:
                for came in self.transport.receive(socket):
                    if isinstance(came.message, kinds):
                        return came.peer, came.message
        raise TimeoutError(f"no {kinds[0].__name__} came")


class Invitation(NamedTuple):
    """What a worker needs to connect to its shard; also in another process."""

    run_id: str
    slot: int
    size: int
    address: str
    token: str
    """In hexadecimal, so that all of this can be JSON."""
    secret: str = ""
    server_key: str = ""
    server_pid: int = 0


class Worker:
    """A worker of the shard. Every method blocks until the answer arrives."""

    def __init__(self, invitation: Invitation) -> None:
        self.end = End(invitation.secret)
        self.size, self.slot = invitation.size, invitation.slot
        self.server_pid = invitation.server_pid
        self._seq = 0
        self.version = 0
        """Of the shard at the last fetch: the number of applied pushes."""
        self._request = 0
        self._basis = Basis()
        self.end.transport.connect(SERVER, invitation.address, invitation.server_key)
        self._join(invitation)

    def _join(self, invitation: Invitation) -> None:
        slot = self.slot
        token = bytes.fromhex(invitation.token)
        self.end.transport.send(SERVER, m.Join(invitation.run_id, slot, TERM, token))
        _, joined = self.end.wait_for(m.Joined)
        if joined.initialised:
            return
        values = np.zeros(self.size, np.float32)
        self.end.transport.send(SERVER, m.Initialise(slot, TERM, values, np.zeros(0)))
        _, joined = self.end.wait_for(m.Joined)
        assert joined.initialised

    def close(self) -> None:
        self.end.transport.close()

    def next_push(self, delta: m.Packed) -> m.Push:
        """The message that `push` would send now."""
        seq = version = self._seq
        return m.Push(self.slot, TERM, SHARD_TERM, seq, version, 0, 0, 32, 0, delta)

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """For a poller of several workers."""
        return [socket for socket, _ in self.end.poller.sockets]

    @property
    def pushes(self) -> int:
        """Number of pushes sent."""
        return self._seq

    def push(self, delta: m.Packed) -> m.Ack:
        """Returns when the shard has acknowledged it."""
        self.send_push(delta)
        _, ack = self.end.wait_for(m.Ack)
        assert ack.outcome == m.APPLIED, ack
        return ack

    def send_push(self, delta: m.Packed) -> None:
        """Returns at once."""
        self.end.transport.send(SERVER, self.next_push(delta))
        self._seq += 1

    def fetch(self) -> m.Array:
        """float32[size], the shard's parameters."""
        self._request += 1
        self.end.transport.send(SERVER, m.Fetch(self.slot, TERM, self._request, 0))
        _, parameters = self.end.wait_for(m.Parameters)
        self.version = parameters.version
        return parameters.values

    def push_and_update(self, delta: m.Packed, model: m.Array) -> int:
        """Push and fetch without waiting for the ack between; updates `model`, float32[size], to
        the shard's state. Returns the received bytes.

        `model` starts with zeros, and only this method may write to it.
        """
        have = (self._basis.term, self._basis.version)
        self._request += 1
        self.send_push(delta)
        self.end.transport.send(SERVER, m.Fetch(self.slot, TERM, self._request, 0, *have))
        _, answer = self.end.wait_for(m.Parameters, m.SparseParameters)
        assert answer.version >= self._seq, answer  # Other workers may have pushed, too.
        self.version = answer.version
        self._basis.place(slice_in(answer, self.size), model, keep=False)
        return answer_bytes(answer)


@contextmanager
def shard(
    directory: Path,
    transport: str,
    size: int,
    optimizer: str = "sgd",
    compressor: str = "none",
    durability: str = "process",
) -> Iterator[Worker]:
    """A server process that owns `size` parameters, all zero, and its only worker.

    `transport` is "ipc", "tcp", or "curve": tcp with keys.
    """
    with serving(directory, transport, size, optimizer, compressor, durability) as (invitation,):
        worker = Worker(invitation)
        try:
            yield worker
        finally:
            worker.close()


@contextmanager
def serving(
    directory: Path,
    transport: str,
    size: int,
    optimizer: str = "sgd",
    compressor: str = "none",
    durability: str = "process",
    workers: int = 1,
    start: Callable[..., subprocess.Popen[bytes]] = local.start,
) -> Iterator[list[Invitation]]:
    """A server process that owns `size` parameters, and an invitation for each worker."""
    run = directory / f"bench-{secrets.token_hex(4)}"
    job = config.JobFile(
        job=config.Job(name="bench", task="none"),
        optimizer=config.Choice(name=optimizer),
        compression=config.Choice(name=compressor),
        network=NETWORKS[transport],
        servers=config.Servers(durability=durability),  # type: ignore[arg-type]
        workers=config.Workers(count=workers),
    )
    (run / "logs").mkdir(parents=True)
    (run / "job.json").write_text(json.dumps(config.to_dict(job)))
    run_key = secrets.token_bytes(keys.KEY_BYTES)
    keyring = keys.CurveKeys(run_key) if job.is_encrypted else Keyring(run_key)
    coordinator = End(keyring.secret(COORDINATOR))
    control = coordinator.transport.listen(addresses.of_coordinator(run.name, job).bind)
    coordinator.transport.admit(keys_of(keyring, [SERVER]))
    credentials = Credentials(keyring.secret(SERVER), keyring.public(COORDINATOR))
    process = start(run, "server", SERVER, 1, control, credentials)
    try:
        names = [f"worker-{slot}" for slot in range(workers)]
        peer, address = _assign(coordinator, size, keyring, names)
        yield [
            Invitation(
                run.name, slot, size, address,
                sign(keyring.token_key, run.name, slot, TERM).hex(),
                keyring.secret(name), keyring.public(SERVER), process.pid,
            )
            for slot, name in enumerate(names)
        ]  # fmt: skip
        coordinator.transport.send(peer, m.Shutdown("measured"))
        if process.wait(30):
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
    except TimeoutError as error:
        log = "".join(path.read_text() for path in (run / "logs").iterdir())
        state = f"exit code {code}" if (code := process.poll()) is not None else "alive"
        raise RuntimeError(f"{error}; last lines of the server ({state}): {log[-1000:]}") from error
    finally:
        process.kill()
        process.wait()
        coordinator.transport.close()
        paths.remove_sockets(run.name)
        shutil.rmtree(kept_shards.shared_memory() / run.name, ignore_errors=True)


def _assign(coordinator: End, size: int, keyring: Keyring, workers: list[str]) -> tuple[Peer, str]:
    """The coordinator's part; returns (the server's connection, the address that it serves at)."""
    layout = Layout((TensorEntry("w", TRAINED, (size,), "float32"),)).to_bytes()
    peer, _ = coordinator.wait_for(m.Register)
    allowed_peers = json.dumps(keys_of(keyring, workers)).encode()
    coordinator.transport.send(peer, m.Welcome(SERVER, 0, SHARD_TERM, keyring.token_key, {}))
    coordinator.transport.send(peer, m.AllowedPeers(1, allowed_peers))
    coordinator.transport.send(peer, m.Assign((0, size), layout, "", step_samples=32))
    _, serving = coordinator.wait_for(m.Serving)
    return peer, serving.address
