"""A lab and its hosts, for tests of whatever starts dlctl on other machines.

The *lab* is a network with a switch; the command under test and its coordinator run there, with
this machine's files and processes. The *hosts* h1, h2 ... are plugged into it: each has an address,
a name, processes, files, a monotonic clock and an sshd of its own (`host_process.py`). Nothing of a
run directory in the lab is to be found on a host, unless it is `shared`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import dlctl

from . import broken, holders, keys
from .delay import TUN
from .holders import Holder, HostHolder
from .network import LAB_ADDRESS, PREFIX, Network, address_of

LAB = "lab"
KEY = "key"
TOOLS = (
    "ip", "tc", "ss", "bridge", "nft", "unshare", "nsenter", "mount", "ssh", "ssh-keygen", "sshd",
)  # fmt: skip
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
"""Not in everybody's PATH."""
SOURCE = Path(dlctl.__file__).resolve().parents[1]
VISIBLE = (sys.prefix, sys.base_prefix, SOURCE / "dlctl", SOURCE / "daemons")
"""Installed on every host. Nothing else of the project's folder is there: runs may be in it."""
SHADOW = "root:*:::::::\n"
"""No password, and not locked, as it is on some machines: nobody may log in to a locked account."""
COMMAND_S_MAX = 30.0


class Listener(NamedTuple):
    address: str
    port: int
    process: str
    """The name of the program; "" if it has just ended."""
    pid: int
    """As this machine counts it; 0 if it has just ended."""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid() != 0:
        return "not root"
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    if absent := [tool for tool in TOOLS if not shutil.which(tool, path=path)]:
        return f"not here: {', '.join(absent)} (iproute2, nftables, openssh-server, util-linux)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"no {TUN} here, or only for others"
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """Up with `with`; afterwards nothing of it is left, also if this process is killed meanwhile.

    `shared` directories are the same for the lab and all hosts, and writable, as on a file server.
    With `are_names_known=False`, only ssh knows where "h1" is, as with an alias in ~/.ssh/config.
    """

    def __init__(
        self, count: int = 3, shared: Sequence[Path] = (), *, are_names_known: bool = True
    ) -> None:
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self.python = sys.executable
        """On every host, too; dlctl and torch are installed for it."""
        self._shared, self._are_names_known = shared, are_names_known
        self._addresses = {name: address_of(n) for n, name in enumerate(self.names, 1)}
        self._hosts: dict[str, HostHolder] = {}
        self._lab: Holder | None = None
        self._network: Network | None = None

    def __enter__(self) -> Cluster:
        # Short, because paths of sockets must be.
        self.directory = Path(tempfile.mkdtemp(prefix="dlctl-hosts-"))
        """Keys, known hosts and ssh's configuration; not on the hosts."""
        path = f"{self.directory}/bin:{os.environ.get('PATH', '')}:{SBIN}"
        dropped = ("SSH_AUTH_SOCK", "SSH_AGENT_PID")
        self.env = {k: v for k, v in os.environ.items() if k not in dropped} | {"PATH": path}
        """The environment of commands in the lab: `ssh` finds the hosts and their keys."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """All at once; what takes long is waited for last."""
        self._lab = Holder(holders.LAB, "lab_process", LAB, str(self.directory), env=self.env)
        for number, name in enumerate(self.names, 1):
            self._hosts[name] = HostHolder(number, self.env)
        keys.make(self.directory, [KEY, *self.names])
        keys.client(self.directory, self._addresses)
        (self.directory / "hosts").write_text(self._hosts_file(LAB))
        self._lab.expect("here")
        self._lab.tell({})
        self._lab.expect("up")
        for host in self._hosts.values():
            host.meet()
        self._network = Network(self._lab, self._hosts)
        for name, host in self._hosts.items():
            host.tell(self._plan(name))
        for host in self._hosts.values():
            host.expect("up")

    def _hosts_file(self, name: str) -> str:
        lines = ["127.0.0.1 localhost", f"{self.address(name)} {name}"]
        if self._are_names_known:
            lines += [f"{self.address(other)} {other}" for other in (LAB, *self.names)]
        return "\n".join([*lines, ""])

    def _plan(self, name: str) -> dict[str, Any]:
        """What a host is told about itself."""
        environment = self._environment()
        host_key = (self.directory / name).read_text()
        files = {
            "/etc/hostname": (f"{name}\n", 0o644),
            "/etc/hosts": (self._hosts_file(name), 0o644),
            "/etc/shadow": (SHADOW, 0o600),
            "/etc/machine-id": (f"{uuid.uuid4().hex}\n", 0o444),
            "/run/host/boot_id": (f"{uuid.uuid4()}\n", 0o444),
            "/run/host/sshd_config": (keys.server(self.address(name), environment), 0o644),
            "/run/host/host_key": (host_key, 0o600),
            "/root/.ssh/authorized_keys": (keys.public(self.directory, KEY), 0o600),
        }
        visible = {os.path.realpath(path) for path in VISIBLE}
        return {
            "name": name,
            "address": f"{self.address(name)}/{PREFIX}",
            "visible": sorted(visible),
            "shared": [os.path.realpath(path) for path in self._shared],
            "files": files,
            "sshd": shutil.which("sshd", path=self.env["PATH"]),
        }

    def _environment(self) -> dict[str, str]:
        """Of whoever logs in."""
        return {
            "PYTHONPATH": str(SOURCE),
            "XDG_RUNTIME_DIR": "/run/user/0",
            "FAULTS_CLOCK": broken.CLOCK,
        }

    def close(self) -> None:
        """End everything, first on the hosts, then in the lab."""
        with ExitStack() as ends:  # all of them, also if one fails; the last one first
            ends.callback(shutil.rmtree, self.directory, ignore_errors=True)
            if self._lab:
                ends.callback(self._lab.close)
            if self._network:
                ends.callback(self._network.close)
            for host in self._hosts.values():
                ends.callback(host.close)
                host.release()

    # ------------------------------------------------------------ what is there

    @property
    def enter(self) -> tuple[str, ...]:
        """Put before a command line, runs it in the lab, in the current directory."""
        there = """sh -c 'cd "$1" && shift && exec "$@"' sh "$(pwd -P)" "$@\""""
        script = f"exec nsenter -t {self._holder(LAB).pid} -n -u -m -- {there}"
        return ("sh", "-c", script, "sh")

    def address(self, name: str) -> str:
        return LAB_ADDRESS if name == LAB else self._addresses[name]

    def files(self, host: str) -> Path:
        """The root of a host's files, as it sees them. Raises RuntimeError if it is lost."""
        return self._hosts[host].files

    def processes(self, name: str) -> list[psutil.Process]:
        """Of a host or the lab, as this machine counts them; none of sshd and of the harness."""
        own = set(self._net.pids) if name == LAB else set()
        found = self._holder(name).processes()
        return [p for p in found if p.pid not in own and _name(p) not in ("", "sshd")]

    def listening(self, name: str) -> list[Listener]:
        """Every TCP port that somebody listens at, ordered by port."""
        lines = self._holder(name).do("ss", "-Hltnp").splitlines()
        return sorted((_listener(line) for line in lines), key=lambda found: found.port)

    def run(self, *argv: str, timeout_s: float = COMMAND_S_MAX) -> subprocess.CompletedProcess[str]:
        """Run a command in the lab to its end. Raises TimeoutExpired."""
        return subprocess.run(
            [*self.enter, *argv],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env=self.env, timeout=timeout_s,
        )  # fmt: skip

    def ssh(
        self, host: str, *words: str, timeout_s: float = COMMAND_S_MAX
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the shell on a host, from the lab."""
        return self.run("ssh", "-o", "BatchMode=yes", host, *words, timeout_s=timeout_s)

    def tcp_socket(self, name: str) -> socket.socket:
        """A TCP socket of this process that is in the network of a host or the lab."""
        return self._holder(name).tcp_socket()

    def thread(self, name: str = LAB) -> ThreadPoolExecutor:
        """A thread of this process that is in the network of a host or the lab.

        So is all that it starts, and every socket that it opens. To be closed before the cluster.
        """
        return self._holder(name).thread()

    def inside(self, host: str) -> tuple[str, ...]:
        """Put before a command line, runs it on a host without ssh; not as one of its processes.

        The harness's own way in: it works when the network does not.
        """
        return tuple(self._holder(host).command(spaces="-n -u -i -m"))

    def login(self, host: str) -> tuple[str, ...]:
        """Put before a command line, runs it on a host without ssh, as one of its processes."""
        set_there = [f"{key}={value}" for key, value in self._environment().items()]
        return (*self._hosts[host].login("env", *set_there),)

    # ------------------------------------------------------------ faults

    def shape(self, host: str, mbit_per_s: float | None = None, delay_ms: float = 0.0) -> None:
        """Its link carries no more than that, each way, and takes that long, each way.

        None: as fast as it goes. Connections live on. The queue before a slow link holds 50 ms.
        """
        self._net.shape(host, mbit_per_s, delay_ms)

    def cut(self, host: str) -> None:
        """Nothing gets to the host or from it any more; nobody is told."""
        self._net.cut(host)

    def heal(self, host: str) -> None:
        """The end of `cut`."""
        self._net.heal(host)

    def lose(self, host: str) -> None:
        """The host loses its power for good: no process of it says good-bye."""
        self._net.cut(host)
        self._hosts[host].kill()

    # ------------------------------------------------------------ set up wrongly (see broken.py)

    def break_key(self, host: str) -> None:
        """It does not know our key: ssh is refused."""
        broken.authorize(self._hosts[host], keys.public(self.directory, host))

    def mend_key(self, host: str) -> None:
        broken.authorize(self._hosts[host], keys.public(self.directory, KEY))

    def firewall(self, host: str, ports: Iterable[int | str]) -> None:
        broken.firewall(self._hosts[host], ports)

    def small_shm(self, host: str, size_bytes: int) -> None:
        broken.small_shm(self._hosts[host], size_bytes)

    def read_only_home(self, host: str) -> None:
        broken.read_only_home(self._hosts[host])

    def hide_torch(self, host: str) -> None:
        broken.hide_torch(self._hosts[host])

    def other_version(self, host: str, version: str = "0.0.1") -> None:
        broken.other_version(self._hosts[host], version)

    def fake_clock(self, host: str, offset_s: int) -> None:
        broken.fake_clock(self._hosts[host], broken.build_clock(self.directory), offset_s)

    # ------------------------------------------------------------ inside

    @property
    def _net(self) -> Network:
        assert self._network is not None
        return self._network

    def _holder(self, name: str) -> Holder:
        if name != LAB:
            return self._hosts[name]
        assert self._lab is not None
        return self._lab


def _name(process: psutil.Process) -> str:
    """ "" if it is gone."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.NoSuchProcess:
        return ""


def _listener(line: str) -> Listener:
    """From: LISTEN 0 128 10.99.1.1:22 0.0.0.0:* users:(("sshd",pid=7,fd=3))"""
    fields = line.split()
    address, _, port = fields[3].rpartition(":")
    if len(fields) < 6:
        return Listener(address, int(port), "", 0)
    _, process, rest = fields[5].split('"', 2)
    pid = rest.removeprefix(",pid=").partition(",")[0]
    return Listener(address, int(port), process, int(pid))
