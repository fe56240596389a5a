"""The agents of a coordinator: started by it, or adopted at its start.

The launcher of its host manages each agent.
"""

from __future__ import annotations

import logging

from daemons import process
from daemons.log_tail import LINES, exit_code, last_lines
from daemons.loop import Loop
from dlctl import placement, registry
from dlctl.launch.base import Credentials, Ended, Launcher, Notice, Order, Waiting
from dlctl.messages import ProcessExited
from dlctl.roles.coordinator.records import KillAgent, LaunchAgent
from dlctl.roles.protocol.effects import AgentWaits, HostsTaken, ProcessEnded
from dlctl.roles.protocol.limits import STATUS_UNKNOWN
from dlctl.runs import paths
from dlctl.runs.database import RunDb
from dlctl.runs.memory import DAEMON, Memory

log = logging.getLogger("dlctl")


class Agents:
    def __init__(
        self, context: process.DaemonContext, loop: Loop, control: str, public: str
    ) -> None:
        """`public`: the coordinator's own public key, if it has one."""
        self.context = context
        self.loop = loop
        self.control = control
        self.public = public
        self._launchers: dict[str, Launcher] = {}
        """Agent -> the launcher of its host."""
        hosts = placement.agents(context.job.places)
        for kind in sorted({host.launcher for host in hosts.values()}):
            own = {name: host for name, host in hosts.items() if host.launcher == kind}
            load = registry.load("launchers", kind)
            launcher = load(context.directory, own, loop, self._on_report)
            self._launchers |= dict.fromkeys(own, launcher)
            loop.chores.append(launcher.look)
        loop.perform(LaunchAgent, self._launch)
        loop.perform(KillAgent, lambda effect: self._launchers[effect.name].kill(effect.name))

    def adopt(self, db: RunDb) -> dict[str, int]:
        """Adopt the running agents of this run: name -> incarnation.

        The state of agents on other machines is unknown until a message or a timeout.
        """
        recorded = _recorded(db)
        found: dict[str, int] = {}
        for launcher in set(self._launchers.values()):
            found |= launcher.adopt(recorded)
        return found

    def _launch(self, effect: LaunchAgent) -> None:
        credentials = Credentials(effect.secret, self.public)
        order = Order(effect.name, effect.incarnation, self.control, credentials)
        self._launchers[effect.name].start(order)

    def close(self) -> None:
        """The run has ended: see `Launcher.close`."""
        for launcher in set(self._launchers.values()):
            launcher.close()

    def _on_report(self, news: Ended | Waiting | Notice) -> None:
        match news:
            case Ended():
                self._ended(news)
            case Waiting(name, incarnation, why):
                self.loop.post(AgentWaits(name, incarnation, why))
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
