"""Launchers that can run a command on each of their hosts at any time.

The command is `daemons.node`, which answers requests about its host: it starts an agent, reports
what is left of a run, ends it, and measures for `dlctl doctor`. Of such a launcher only the command
line remains to be written, as `ssh HOST -- ...` or that of a container.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlctl.errors import DlctlError
from dlctl.job.config import Host
from dlctl.launch import answers, base, calls, remote
from dlctl.launch.answers import CallResult
from dlctl.launch.launcher import Launcher, LeftBehind
from dlctl.launch.session import Session

ANSWER_S = 20.0
"""Time for a host to answer, on top of the time that its work may take."""


class Reached(Launcher):
    can_ask = True
    copies_files = True
    outlives = True

    @abstractmethod
    def command(self, host: Host, *, is_shared: bool) -> list[str]:
        """What runs `calls.node_words(host)` on a host: a command of this machine that passes its
        standard input and output on, and ends with the exit code of the remote one. `is_shared`: it
        may use a connection that stays open for the next call, which is slow to detect that its
        host is gone. Raises DlctlError.
        """

    def explain(self, answer: CallResult) -> DlctlError:
        error = answers.explain(answer)
        return error if self.takes_hosts else answers.of_launcher(error, f"launcher {self.title}")

    def call(
        self, host: Host, request: Mapping[str, Any], timeout_s: float, *, is_shared: bool = True
    ) -> calls.Call:
        """A request in flight. Raises DlctlError and OSError."""
        command = self.command(host, is_shared=is_shared)
        return calls.Call(host.name, command, request, timeout_s)

    def ask(
        self, hosts: Mapping[str, Host], request: Mapping[str, Any], timeout_s: float
    ) -> dict[str, CallResult]:
        """`request` is sent to all, with the agent's name and the directory of its host's files
        added. Raises UsageError for an invalid host, and OSError.
        """
        asked: dict[str, calls.Call] = {}
        try:
            for agent, host in hosts.items():
                own = {**request, "agent": agent, "dir": host.dir}
                asked[agent] = self.call(host, own, timeout_s)
        except BaseException:
            for call in asked.values():
                call.cancel()
            raise
        return calls.wait_for(asked)

    def session(self, host: Host) -> Session:
        return Session(host.name, self.command(host, is_shared=False), self.explain)

    def agents(
        self,
        directory: Path,
        hosts: Mapping[str, Host],
        watcher: base.Watcher,
        tell: Callable[[base.News], None],
    ) -> base.AgentControl:
        return remote.RemoteAgents(self, directory, hosts, watcher, tell)

    def end(
        self, directory: Path, hosts: Mapping[str, Host], grace_s: float, *, purge: bool
    ) -> list[LeftBehind]:
        request = remote.end_request(directory.name, grace_s=round(grace_s), purge=purge)
        found = self.ask(hosts, request, grace_s + ANSWER_S)
        return [self._left(answer) for answer in found.values()]

    def _left(self, answer: CallResult) -> LeftBehind:
        host, value = answer.host, answer.value
        if value is None or not answer.is_good:
            return LeftBehind(host, error=self.explain(answer), may_run=True)
        parts = (("ended", "ended"), ("could not end", "left"))
        done = [f"{what} on {host}: {_names(value[key])}" for what, key in parts if value[key]]
        return LeftBehind(host, tuple(done), may_run=bool(value["left"]))


def _names(daemons: list[Any]) -> str:
    return ", ".join(map(str, daemons))
