"""The lab's switch, and the cables from it to the hosts: slow, long, or pulled out."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from .holders import TESTS, Holder, HostHolder, program

LAB_ADDRESS = "10.99.0.1"
PREFIX = 16
# A switch that took over the address of one of its ports would become another one when it leaves.
SWITCH_MAC = "02:99:00:00:00:01"
FORWARDING, DISABLED = 3, 0
QUEUE_MS = 50
BURST_MS = 5
BURST_BYTES_MIN = 4000
"""Two packets: with less, nothing would ever get through."""


def address_of(number: int) -> str:
    """Of h1, h2 ...: 10.99.1.1, 10.99.1.2 ..."""
    return f"10.99.{1 + number // 250}.{number % 250}"


class Network:
    def __init__(self, lab: Holder, hosts: Mapping[str, HostHolder]) -> None:
        """Join the hosts' `eth0` with the lab. What they call it is for them to say."""
        self._lab, self._hosts = lab, hosts
        self._long_cables: dict[str, subprocess.Popen[str]] = {}
        self._cut: set[str] = set()
        lines = [
            "link set lo up",
            f"link add br0 address {SWITCH_MAC} type bridge mcast_snooping 0",
            f"addr add {LAB_ADDRESS}/{PREFIX} dev br0",
            "link set br0 up",
        ]
        for name, host in hosts.items():
            # No ARP: an end that is off the switch is a cable, and must not speak for the lab.
            lines += [
                f"link add {name} type veth peer name eth0 netns {host.pid}",
                f"link set {name} arp off addrgenmode none",
                f"link set {name} master br0 up",
            ]
        lab.ip(*lines)

    # ------------------------------------------------------------ slow and long

    def shape(self, name: str, mbit_per_s: float | None, delay_ms: float) -> None:
        """Both ways; None: as fast as it goes. The delay is that of one way."""
        self._slow(self._lab, name, mbit_per_s)
        self._slow(self._hosts[name], "eth0", mbit_per_s)
        self._shorten(name)
        if delay_ms:
            self._lengthen(name, delay_ms)
        if name in self._cut:
            self.cut(name)

    def _slow(self, end: Holder, device: str, mbit_per_s: float | None) -> None:
        replace = ["tc", "qdisc", "replace", "dev", device, "root"]
        if mbit_per_s is None:
            end.do(*replace, "pfifo_fast")
            return
        bytes_per_ms = mbit_per_s * 1e6 / 8 / 1000
        burst_bytes = max(BURST_BYTES_MIN, round(bytes_per_ms * BURST_MS))
        rate = ["rate", f"{round(mbit_per_s * 1e6)}bit", "burst", str(burst_bytes)]
        queue = ["latency", f"{QUEUE_MS}ms"]
        end.do(*replace, "tbf", *rate, *queue)

    def _lengthen(self, name: str, delay_ms: float) -> None:
        """Put a process between the cable and the switch that keeps every packet for a while."""
        self._lab.ip(f"link set {name} nomaster")
        process = subprocess.Popen(
            self._lab.command(*program("delay", name, _far(name), str(delay_ms))),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=TESTS, start_new_session=True,
        )  # fmt: skip
        self._long_cables[name] = process
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise RuntimeError(f"no delay for {name}: see standard error")
        self._lab.ip(f"link set {_far(name)} master br0 up")

    def _shorten(self, name: str) -> None:
        if process := self._long_cables.pop(name, None):
            end(process)
            self._lab.ip(f"link set {name} master br0")

    # ------------------------------------------------------------ cut

    def cut(self, name: str) -> None:
        """Nothing gets through any more, and neither end is told: its link stays up."""
        self._cut.add(name)
        self._set_port(name, DISABLED)

    def heal(self, name: str) -> None:
        self._cut.discard(name)
        self._set_port(name, FORWARDING)

    def _set_port(self, name: str, state: int) -> None:
        port = _far(name) if name in self._long_cables else name
        self._lab.do("bridge", "link", "set", "dev", port, "state", str(state))

    @property
    def pids(self) -> list[int]:
        """Of the processes that delay packets."""
        return [process.pid for process in self._long_cables.values()]

    def close(self) -> None:
        for name in list(self._long_cables):
            end(self._long_cables.pop(name))


def _far(name: str) -> str:
    """The end at the switch of a cable with a delay."""
    return f"{name}-far"


def end(process: subprocess.Popen[str]) -> None:
    """It ends when its input is closed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()
