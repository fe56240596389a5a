"""Where the daemons of a run listen, and the addresses that they advertise.

On a single machine they listen on unix sockets or on the loopback interface, which no other machine
reaches. With other hosts, each daemon listens on one address at which the others reach its host.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from dlctl.errors import DlctlError
from dlctl.job import placement
from dlctl.job.config import Host, JobFile
from dlctl.launch import launcher
from dlctl.runs import paths

LOOPBACK = "127.0.0.1"


class ListenPlace(NamedTuple):
    """Where to listen, and the host name to advertise; "": the same."""

    bind: str
    advertised: str = ""

    def advertise(self, endpoint: str) -> str:
        """The advertised address of a bound endpoint, with its port."""
        port = endpoint.rpartition(":")[2]
        return f"tcp://{_bracketed(self.advertised)}:{port}" if self.advertised else endpoint


def of_coordinator(run_id: str, job: JobFile) -> ListenPlace:
    """Where the coordinator listens. Raises DlctlError if the address is unknown."""
    if not job.uses_tcp:
        return ListenPlace(paths.socket_address(run_id, "control"))
    host = here(job)
    if job.has_other_hosts:
        host = job.network.address or _address_towards(launcher.of(job).an_address(job.places))
    return ListenPlace(_tcp(host, job.network.port))


def of_server(run_id: str, name: str, job: JobFile, agent: str, control: str) -> ListenPlace:
    """Where server `name` listens, on the host of `agent`. `control`: the coordinator's address.

    Raises DlctlError if this machine's address cannot be determined.
    """
    if not job.uses_tcp:
        return ListenPlace(paths.socket_address(run_id, name))
    return _of_agent(port_of(name, job), job, agent, control)


def of_worker(run_id: str, name: str, job: JobFile, agent: str, control: str) -> ListenPlace:
    """Where a worker listens that serves other replicas. Its port follows those of the servers."""
    if not job.uses_tcp:
        return ListenPlace(paths.socket_address(run_id, name))
    port = port_of(name, job)
    return _of_agent(port + job.servers.count if port else 0, job, agent, control)


def _of_agent(port: int, job: JobFile, agent: str, control: str) -> ListenPlace:
    if not job.has_other_hosts:
        return ListenPlace(_tcp(here(job), port))
    return on_host(placement.agents(job.places)[agent], port, control)


def here(job: JobFile) -> str:
    """Where the daemons of a job without other hosts listen. Workers that join reach them there, or
    at `network.address`, whose ports are forwarded to there.
    """
    network = job.network
    return ((network.bind or network.address) if job.takes_guests else "") or LOOPBACK


def of_guests(job: JobFile, control: str) -> str:
    """Where workers that join reach the coordinator; control: where it listens."""
    network = job.network
    if not (network.bind and network.address):
        return control
    return f"tcp://{_bracketed(network.address)}:{control.rpartition(':')[2]}"


def as_dialled(address: str, control: str) -> str:
    """Where a worker that joined reaches a server of the coordinator's machine: at the host at
    which it has reached the coordinator, so that forwarded ports and tunnels work.
    """
    return f"{control.rpartition(':')[0]}:{address.rpartition(':')[2]}"


def on_host(host: Host, port: int, control: str) -> ListenPlace:
    """Where a server listens, at this port of one of several hosts; 0: any free port.

    Raises DlctlError if this machine's address cannot be determined.
    """
    own = host.bind or host.data
    if not own:
        coordinator = host_of(control)
        own = _address_towards(coordinator) if host.is_other else coordinator
    return ListenPlace(_tcp(own, port), host.data if host.bind else "")


def port_of(name: str, job: JobFile) -> int:
    """The port that is configured for the coordinator or a server; 0: any free one."""
    if not job.network.port:
        return 0
    number = name.rpartition("-")[2]
    return job.network.port + (1 + int(number) if number.isdecimal() else 0)


def host_of(address: str) -> str:
    """The host in "tcp://HOST:PORT"."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _tcp(host: str, port: int) -> str:
    return f"tcp://{_bracketed(_resolved(host))}:{port or '*'}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _resolved(host: str) -> str:
    """The IP address to bind: a listener binds to an address, not to a host name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return _lookup(host)[0]


def _lookup(host: str) -> tuple[str, socket.AddressFamily]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise DlctlError(
            f'the name "{host}" cannot be resolved: {error.strerror or error}',
            hint="set data in [[hosts]], or address in [network], to an address",
        ) from error
    return str(address[0]), family


def _address_towards(host: str) -> str:
    """This machine's own address on the route to another host. Nothing is sent."""
    address, family = _lookup(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise DlctlError(
                f"this machine has no route to {host} ({address}): {error.strerror}",
                hint="set data in [[hosts]], or address in [network]",
            ) from error
        return str(probe.getsockname()[0])
