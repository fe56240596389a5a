"""The agents of a coordinator: started by it, or adopted at its start.

The launcher of its host manages each agent.
"""

from __future__ import annotations

import logging

from daemons import process
from daemons.log_tail import LINES, exit_code, last_lines
from daemons.loop import Loop
from dlctl.job import placement
from dlctl.job.config import Host
from dlctl.launch import launcher
from dlctl.launch.base import (
    AgentControl,
    Credentials,
    Ended,
    Going,
    News,
    Notice,
    StartOrder,
    Taken,
    Waiting,
)
from dlctl.launch.launcher import Launcher
from dlctl.records.memory import DAEMON, Memory
from dlctl.roles.coordinator.records import KillAgent, LaunchAgent, WantHosts
from dlctl.roles.protocol.effects import AgentWaits, HostsTaken, HostTaken, ProcessEnded
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.runs import paths
from dlctl.runs.database import RunDb
from dlctl.wire.messages import ProcessExited

log = logging.getLogger("dlctl")
HOME = "local"
"""The launcher of the agent on this machine."""


class Agents:
    def __init__(
        self, context: process.DaemonContext, loop: Loop, control: str, public: str
    ) -> None:
        """`public`: the coordinator's own public key, if it has one."""
        self.context = context
        self.loop = loop
        self.control = control
        self.public = public
        self._controls: dict[str, AgentControl] = {}
        """Agent -> the control of its launcher."""
        hosts = placement.agents(context.job.places)
        others = {name: host for name, host in hosts.items() if host.is_other}
        self._control(
            {name: hosts[name] for name in hosts.keys() - others}, launcher.made(HOME, {})
        )
        if others:
            self._control(others, launcher.of(context.job))
        loop.perform(LaunchAgent, self._launch)
        loop.perform(WantHosts, self._want)
        loop.perform(KillAgent, lambda effect: self._controls[effect.name].kill(effect.name))

    def _control(self, hosts: dict[str, Host], own: Launcher) -> None:
        control = own.agents(self.context.directory, hosts, self.loop, self._on_report)
        self._controls |= dict.fromkeys(hosts, control)
        self.loop.chores.append(control.look)

    def adopt(self, db: RunDb) -> dict[str, int]:
        """Adopt the running agents of this run: name -> incarnation.

        The state of agents on other machines is unknown until a message or a timeout.
        """
        recorded = _recorded(db)
        found: dict[str, int] = {}
        for control in set(self._controls.values()):
            found |= control.adopt(recorded)
        return found

    def _launch(self, effect: LaunchAgent) -> None:
        credentials = Credentials(effect.secret, self.public)
        order = StartOrder(effect.name, effect.incarnation, self.control, credentials)
        self._controls[effect.name].start(order)

    def _want(self, effect: WantHosts) -> None:
        for control in set(self._controls.values()):
            control.want(effect.agents)

    def close(self) -> None:
        """The run has ended: see `AgentControl.close`."""
        for control in set(self._controls.values()):
            control.close()

    def _on_report(self, news: News) -> None:
        match news:
            case Ended():
                self._ended(news)
            case Waiting(name, incarnation, why):
                self.loop.post(AgentWaits(name, incarnation, why))
            case Going(name, incarnation, why) | Taken(name, incarnation, why):
                log.info("%s: %s", name, why)
                self.loop.post(HostTaken(name, incarnation, isinstance(news, Taken), why))
            case Notice(kind, reason):
                log.warning("%s", reason)
                self.loop.post(HostsTaken(kind, reason))

    def _ended(self, end: Ended) -> None:
        name, incarnation, status = end.name, end.incarnation, end.status
        if end.error is not None:
            words = (*end.words[-LINES:], f"ERROR {process.in_words(end.error)}")
            log.warning("%s: %s", name, " | ".join(words))
        else:
            path = paths.log_path(self.context.directory, name, incarnation)
            words = last_lines(path)
            status = exit_code(path) if status is None else status
        status = STATUS_UNKNOWN if status is None else status
        self.loop.post(ProcessEnded(ProcessExited(name, incarnation, status, words)))


def _recorded(db: RunDb) -> dict[str, int]:
    """The newest incarnation of every daemon that a previous coordinator of this run has started.

    The memory for its successor is newer than the rows that `status` reads.
    """
    remembered = {name: row["incarnation"] for name, row in Memory(db.memory()).under(DAEMON)}
    return db.incarnations() | remembered
