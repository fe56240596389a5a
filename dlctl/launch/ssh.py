"""The launcher for other machines: those of `[[hosts]]`, each reached by the system's ssh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlctl.errors import DlctlError
from dlctl.job.config import Host
from dlctl.launch import sshwords
from dlctl.launch.answers import CallResult
from dlctl.launch.calls import node_words
from dlctl.launch.commands import LATE, wait
from dlctl.launch.reached import Reached

ADDRESS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options: what ssh needs stands in [[hosts]] and in the user's ssh configuration."""


class Ssh(Reached):
    Options = Options
    title = "ssh"
    noun = "host"
    takes_hosts = True
    is_reclaimed = False

    def command(self, host: Host, *, is_shared: bool) -> list[str]:
        path = sshwords.control_path() if is_shared else ""
        return sshwords.argv(host, node_words(host), path)

    def explain(self, answer: CallResult) -> DlctlError:
        return sshwords.explain(answer)

    def an_address(self, hosts: Sequence[Host]) -> str:
        host = next(host for host in hosts if host.is_other)
        return host.data or address_of(host)

    def slow_login(self, host: str) -> str:
        shown = f"ssh -v {host} true shows what is slow"
        return f"{shown}; often UseDNS or GSSAPIAuthentication"


def address_of(host: Host) -> str:
    """Where ssh would connect to, by the user's configuration; opens no connection.

    Raises DlctlError if ssh does not report it.
    """
    try:
        output = wait(sshwords.address_argv(host), ADDRESS_S)
    except OSError as error:
        raise DlctlError(f"ssh does not report the address of {host.ssh}: {error}") from error
    if output.status:
        why = f"no answer in {ADDRESS_S:.0f} s" if output.status == LATE else output.last_line()
        why = why or f"exit {output.status}"
        raise DlctlError(f"ssh does not report the address of {host.ssh}: {why}")
    keys = dict(line.partition(" ")[::2] for line in output.out.splitlines())
    return keys.get("hostname", host.ssh.rpartition("@")[2])
