"""Agents on hosts that can be asked at any time, for their coordinator; and the requests.

An agent outlives the connection that has started it, and no local process watches it. Only an agent
that could not be started, or was killed, is reported; otherwise the coordinator detects its exit by
missing heartbeats.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dlctl import __version__
from dlctl.errors import DlctlError
from dlctl.job import config
from dlctl.job.config import Host
from dlctl.launch import answers, base, partyfiles, taskfiles
from dlctl.launch.calls import Call
from dlctl.launch.commands import wait_for_any
from dlctl.runs import database, task_code
from dlctl.wire import codec

log = logging.getLogger("dlctl")
BEGIN_S = 90.0
KILL_S = 10.0
CLOSE_S, POLL_S = 15.0, 0.2


# ---------------------------------------------------------------- requests


def shared_request(directory: Path) -> dict[str, Any]:
    """The part of the start request that all agents of a run share: the job, and the files of its
    task as they were when the run was started. Raises DlctlError and OSError.
    """
    job = base.read_job(directory)
    home = Path(str(database.read(directory).get("job_file"))).parent
    about = config.from_dict(config.Job, job["job"])
    found = taskfiles.collect(home, about.file, home / about.run_dir)
    for path in found.left_out:
        log.warning("%s is not sent to other hosts: it leads out of %s", path, home)
    root = home.resolve()
    files = {p: task_code.as_it_was(directory, root / p, now) for p, now in found.files.items()}
    return {
        "verb": "begin",
        "version": __version__,
        "protocol": codec.PROTOCOL,
        "run_id": directory.name,
        "job": {
            **partyfiles.relative(job, home),
            "job": dataclasses.asdict(about.with_file(found.file)),
        },
        "files": {path: base64.b64encode(data or b"").decode() for path, data in files.items()},
    }


def begin_request(shared: Mapping[str, Any], order: base.StartOrder) -> dict[str, Any]:
    """Everything that an agent and its daemons need on a machine without files of this run, except
    the host's own `dir`. `shared`: see `shared_request`.
    """
    return {
        **shared,
        "files": partyfiles.of_host(shared["files"], shared["job"], order.name),
        "agent": order.name,
        "incarnation": order.incarnation,
        "control": order.control,
        "secret": order.credentials.secret,
        "coordinator_key": order.credentials.coordinator,
    }


def look_request(run_id: str) -> dict[str, Any]:
    """A request for `Launcher.ask`: query what exists of this run on the host."""
    return {"verb": "look", "run_id": run_id}


def end_request(
    run_id: str, *, grace_s: int = 0, purge: bool = False, only_agent: bool = False
) -> dict[str, Any]:
    """A request for `Launcher.ask`: end the daemons on the host with SIGTERM, and after `grace_s`
    seconds with SIGKILL. purge: also remove all files, including the states of servers. only_agent:
    kill only the agent; its daemons keep running.
    """
    options = {"grace_s": grace_s, "purge": purge, "only_agent": only_agent}
    return {"verb": "end", "run_id": run_id, **options}


# ---------------------------------------------------------------- for the coordinator


class _Asked(NamedTuple):
    call: Call
    is_begin: bool
    """The call starts an agent."""
    then: Callable[[answers.CallResult], None]


class Caller(Protocol):
    """The launcher, as far as its agents need it: `Reached`."""

    def call(
        self, host: Host, request: Mapping[str, Any], timeout_s: float, *, is_shared: bool
    ) -> Call: ...

    def explain(self, answer: answers.CallResult) -> DlctlError: ...


class RemoteAgents:
    """Agents on other hosts: one call at a time for each."""

    def __init__(
        self,
        launcher: Caller,
        directory: Path,
        hosts: Mapping[str, Host],
        watcher: base.Watcher,
        tell: Callable[[base.News], None],
    ) -> None:
        self.launcher = launcher
        self.directory = directory
        self.hosts = hosts
        self.watcher = watcher
        self.tell = tell
        self._incarnations: dict[str, int] = {}
        self._calls: dict[str, _Asked] = {}
        self._to_kill: set[str] = set()
        """Agents that are being started and will be killed as soon as they run."""

    def start(self, order: base.StartOrder) -> None:
        self._incarnations[order.name] = order.incarnation

        def begun(answer: answers.CallResult) -> None:
            if answer.is_good:
                self._log_start(order.name, answer)
                if order.name in self._to_kill:
                    self.kill(order.name)
            else:
                self._failed(order, self.launcher.explain(answer), tuple(answer.lines()))

        self._to_kill.discard(order.name)
        try:
            request = begin_request(self._shared, order)
            self._call(order.name, request, BEGIN_S, begun, is_begin=True)
        except DlctlError as error:
            self._failed(order, error, ())
        except OSError as error:
            self.tell(base.Ended(order.name, order.incarnation, None, _for_now(error)))

    def want(self, names: Collection[str]) -> None:
        """These hosts do not come and go."""

    def kill(self, name: str) -> None:
        """An unreachable agent counts as gone, too: it sends no heartbeats, and its successor kills
        it if it is still running. An agent that is being started is killed after its start: an
        earlier kill would miss it.
        """
        if name in self._beginning():
            self._to_kill.add(name)
            return
        gone = base.Ended(name, self._incarnations.get(name, 0), None)

        def killed(answer: answers.CallResult) -> None:
            if answer.is_good:
                self.tell(gone)
            else:
                words = tuple(answer.lines())
                self.tell(gone._replace(error=self.launcher.explain(answer), words=words))

        request = {**end_request(self.directory.name, only_agent=True), "agent": name}
        try:
            self._call(name, request, KILL_S, killed)
        except DlctlError as error:
            self.tell(gone._replace(error=error))
        except OSError as error:
            self.tell(gone._replace(error=_for_now(error)))

    def adopt(self, recorded: dict[str, int]) -> dict[str, int]:
        """Nothing is known without a call; recorded agents can be killed."""
        self._incarnations |= {name: recorded[name] for name in self.hosts if name in recorded}
        return {}

    def look(self) -> None:
        for name in list(self._calls):
            self._poll(name)

    def close(self) -> None:
        """Kill agents that are still being started."""
        self._to_kill |= self._beginning()
        until = time.monotonic() + CLOSE_S
        while self._calls and time.monotonic() < until:
            wait_for_any([asked.call.fileno() for asked in self._calls.values()], POLL_S)
            self.look()
        for name in sorted(self._beginning()):
            log.warning("%s may still be starting on %s", name, self.hosts[name].name)

    # ------------------------------------------------------------ calls

    @cached_property
    def _shared(self) -> dict[str, Any]:
        return shared_request(self.directory)

    def _beginning(self) -> set[str]:
        return {name for name, asked in self._calls.items() if asked.is_begin}

    def _call(
        self,
        name: str,
        request: dict[str, Any],
        timeout_s: float,
        then: Callable[[answers.CallResult], None],
        *,
        is_begin: bool = False,
    ) -> None:
        """Call the host; a pending call to it is cancelled."""
        self._forget(name)
        host = self.hosts[name]
        whole = {**request, "dir": host.dir}
        call = self.launcher.call(host, whole, timeout_s, is_shared=False)
        self._calls[name] = _Asked(call, is_begin, then)
        if call.fileno() >= 0:
            self.watcher.watch(call.fileno(), lambda: self._poll(name))
        else:
            self._poll(name)

    def _poll(self, name: str) -> None:
        call, _, then = self._calls[name]
        fd, answer = call.fileno(), call.poll()
        if answer is not None:
            del self._calls[name]
            if fd >= 0:
                self.watcher.unwatch(fd)
            then(answer)

    def _forget(self, name: str) -> None:
        if name in self._calls:
            call = self._calls.pop(name).call
            self.watcher.unwatch(call.fileno())
            call.cancel()

    def _failed(self, order: base.StartOrder, error: DlctlError, words: tuple[str, ...]) -> None:
        self.tell(base.Ended(order.name, order.incarnation, error.exit_code, error, words))

    def _log_start(self, name: str, answer: answers.CallResult) -> None:
        assert answer.value is not None
        pid, place = answer.value.get("pid"), answer.value.get("directory")
        log.info("%s is on %s: pid %s, files in %s", name, answer.host, pid, place)
        for line in answer.lines():
            log.info("%s: %s", answer.host, line)


def _for_now(error: OSError) -> DlctlError:
    """A possibly temporary failure: no memory, no pid, no disk space."""
    return DlctlError(f"cannot start it: {error}")
