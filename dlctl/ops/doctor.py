"""From a job file to findings about all of its machines; changes nothing.

Every machine is queried in a session over its own login. It returns facts (`daemons.node`);
`dlctl.health` interprets them.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import DlctlError, NotFound, TimedOut
from dlctl.health import needs, network, resources, software
from dlctl.health.findings import FAULT, LINKS, OK, WARNING, Finding
from dlctl.health.needs import CONTROL, HERE, HostNeed, NeededLink
from dlctl.job import parties
from dlctl.launch import launcher as launchers
from dlctl.launch import session, taskfiles
from dlctl.launch.launcher import Fact, Launcher
from dlctl.launch.session import Session
from dlctl.ops import cases, elsewhere, mirror, plan, trial
from dlctl.ops.trial import NodesTried
from dlctl.runs import paths, select
from dlctl.runs.paths import open_to_all
from dlctl.runs.snapshot import Snapshot
from dlctl.util import notes
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import plural

if TYPE_CHECKING:
    from dlctl.job.config import JobFile

TOKEN_BYTES = 32
LOGIN_S, EXAMINE_S, LISTEN_S, REACH_S = 30.0, 120.0, 10.0, 30.0
LISTENING_S = 45.0
"""A listener runs for a minute."""
HELLOS = 3
AT_ONCE_MAX = 64
NO_JOB = "local"
"""The launcher of a machine without a job."""
Facts = dict[str, Any]


def findings(
    file: Path | None, job: JobFile | None, only_host: str | None, *, on_trial: bool = False
) -> list[Finding]:
    """Findings about all machines of a job, or this one and one other, and the links between them;
    without a job, about this machine. on_trial: also of hosts that their owner gives for this only.

    Raises NotFound if the job has no host of this name, and UsageError if it has none on trial.
    """
    wanted, run, launcher = {HOME_AGENT: needs.NOTHING}, None, launchers.made(NO_JOB, {})
    if file is not None and job is not None:
        launcher = launchers.of(job)
        wanted = needs.of(job, plan.known_model(file, job), others=launcher.can_ask)
        names = [need.name for need in wanted.values()]
        if only_host is not None and only_host not in names:
            raise NotFound(f'the job has no host "{only_host}"; it has {", ".join(names)}')
        chosen = names if only_host is None else [HERE, only_host]
        wanted = {agent: need for agent, need in wanted.items() if need.name in chosen}
        newest = cases.newest(file, job)
        run = newest if newest is not None and newest.is_live else None
    place = elsewhere.of_file(job, file) if job is not None and file is not None else None
    if place is not None:
        wanted = {HOME_AGENT: needs.NOTHING}  # Its daemons are there.
    tried = NodesTried({})
    if on_trial and job is not None and file is not None:
        tried = trial.begin(job, file, launcher, place)
        wanted |= trial.needs_of(job, tried.sessions)
    elif job is not None and launcher.places():
        notes.note(f"no {launcher.noun} is asked; with --nodes some are")
    elif others := len(wanted) - 1:
        notes.note(f"logging in to {plural(others, 'host')} and measuring their links ...")
    with visiting(wanted, launcher, tried.sessions) as visits:
        visits.each(lambda visit: visit.examine(visits.began, _request(visit.need, job, file)))
        found = []
        if job is not None and file is not None:
            found = [*_of_coordinator(visits, job, file, is_here=place is None)]
            known = {(each.subject, each.found) for each in found}
            found += [f for f in tried.findings if (f.subject, f.found) not in known]
        here = visits.all[HOME_AGENT].facts
        for agent, visit in reversed(visits.all.items()):
            found[:0] = _of_machine(visit, here, _held_by(run, agent), launcher)
        if job is None or file is None:
            return found
        own = [each.run_id for each in select.of_job(select.job_file(file), job.job.name)]
        return [*found, *mirror.findings(job, own), *_links(visits, job)]


def _request(need: HostNeed, job: JobFile | None, file: Path | None) -> Facts:
    """What to examine on this machine in particular."""
    folder = str(paths.index_dir().parent) if need.is_here else ""
    if job is not None and file is not None and need.is_here:
        folder = os.path.abspath(file.parent / job.job.run_dir)
    return {
        "dir": need.host.dir,
        "folder": folder,
        "state_dir": job.servers.state_dir if job is not None and need.servers else "",
        "needs_torch": job is None or need.workers > 0,
    }


# ---------------------------------------------------------------- findings


def _of_coordinator(
    visits: Visits, job: JobFile, file: Path, *, is_here: bool
) -> Iterator[Finding]:
    """Make all machines listen where their daemons will; findings about the job as a whole.
    is_here: the coordinator runs on this machine.
    """
    from dlctl.launch import addresses

    here = visits.all[HOME_AGENT].need.name
    if keys := network.keys(job, here):
        yield keys
    subject = visits.launcher.title
    try:
        facts = [Fact(*fact) for fact in visits.launcher.facts()]  # Plain tuples are as good.
        yield from (_of_fact(here, fact) for fact in facts)
        if any(fact.is_fault for fact in facts):
            return  # What follows would fail for the same reason.
        subject = CONTROL
        if is_here and job.has_other_hosts:
            visits.listen(job, addresses.of_coordinator("", job).bind)
        elif is_here and job.uses_tcp:
            visits.listen(job, f"tcp://{addresses.LOOPBACK}:{job.network.port or '*'}")
        subject = visits.launcher.title
        visits.launcher.preflight()
        subject = "task"
        if visits.launcher.copies_files:
            home = file.parent.resolve()
            for needed in parties.files(job):
                taskfiles.collect(home, needed, home / job.job.run_dir)
    except DlctlError as error:
        yield _fault(here, subject, error)


def _of_fact(here: str, fact: Fact) -> Finding:
    mark = FAULT if fact.is_fault else WARNING if fact.fix else OK
    return Finding(here, fact.subject, mark, fact.found, fact.fix)


def _of_machine(
    visit: Visit, here: Mapping[str, Any], run_of: Mapping[int, str], launcher: Launcher
) -> Iterator[Finding]:
    """run_of: pid -> daemon of the live run of this job, see `_held_by`."""
    need, facts, error, subject = visit.need, visit.facts, visit.error, "address"
    if not facts:
        subject = "dlctl" if need.is_here else launcher.title
    elif not need.is_here:
        slow = launcher.slow_login(need.name)
        yield resources.login(need, visit.login_s, launcher.title, slow)
        yield resources.clock(need, visit.offset_s, visit.error_s)
    try:
        with understood(need.name):
            if facts:
                yield from software.findings(need, facts, here or facts)
                yield from resources.findings(need, facts)
                yield network.firewall(need, facts)
                yield from network.listening(need, facts, visit.places, run_of)
    except DlctlError as unknown:
        yield _fault(need.name, "facts", unknown)
    if isinstance(error, TimedOut):  # Nothing is wrong with a machine that nobody has given.
        yield Finding(need.name, subject, WARNING, error.message, error.hint or "see above")
    elif error is not None:
        yield _fault(need.name, subject, error)
    if need.is_here:
        modes = {str(path): mode for path in select.directories() if (mode := open_to_all(path))}
        if modes:
            yield resources.open_runs(need, modes)


def _fault(place: str, subject: str, error: DlctlError) -> Finding:
    return Finding(place, subject, FAULT, error.message, error.hint or "see above")


def _held_by(run: Snapshot | None, agent: str) -> dict[int, str]:
    """pid -> daemon of the live run of this job, on the machine of this agent."""
    if run is None:
        return {}
    rows = [row for row in run.daemons if row.get("agent", HOME_AGENT) == agent]
    if agent == HOME_AGENT:
        rows.append(run.coordinator)
    return {row["pid"]: f"{row['name']} of {run.run_id}" for row in rows if row.get("pid")}


def _links(visits: Visits, job: JobFile) -> Iterator[Finding]:
    """Measurements in rounds; reported in the order of the job file."""
    planned = needs.links({agent: visit.need for agent, visit in visits.all.items()})
    usable = [link for link in planned if visits.is_usable(link)]
    reached: dict[NeededLink, list[tuple[Facts, Facts]]] = {}
    for at_once in needs.rounds(usable):
        # Later, listeners may exit before another measurement completes.
        if time.monotonic() - visits.listening_since < LISTENING_S:
            reached |= visits.reach(at_once)
    for link in planned:
        source, target = visits.all[link.source].need, visits.all[link.target].need
        if link in usable and link not in reached:
            yield network.not_reached(source, target)
        for place, answer in reached.get(link, []):
            facts = visits.all[link.target].facts
            try:
                with understood(source.name):
                    is_fixed = bool(job.network.port)
                    yield network.link(source, target, facts, place, answer, is_fixed)
            except DlctlError as error:
                yield _fault(LINKS, f"{source.name} -> {target.name}", error)


# ---------------------------------------------------------------- the machines


@dataclass
class Visit:
    """One machine, and what is known about it so far."""

    need: HostNeed
    session: Session
    error: DlctlError | None = None
    """Why no more is known; without `facts`, why nothing is."""
    login_s: float = 0.0
    """Time from the login to the first answer."""
    offset_s: float = 0.0
    """How far its clock is ahead of ours."""
    error_s: float = 0.0
    """The uncertainty of `offset_s`."""
    facts: Facts = field(default_factory=dict)
    places: list[Facts] = field(default_factory=list)
    """Where its daemons could listen, or why not."""

    def place(self, daemon: str) -> Facts | None:
        """Where this daemon's listener is now; None if there is none."""
        return next((p for p in self.places if p["name"] == daemon and "told" in p), None)

    def ask(self, verb: str, timeout_s: float, **request: Any) -> Facts:
        return self.session.ask({"verb": verb, **request}, timeout_s)

    def examine(self, began: float, request: Facts) -> None:
        """Compare the clocks, and get its facts; see `daemons.node.examine`. began: the time of the
        login.
        """
        self.error_s = math.inf
        for _ in range(HELLOS):  # The answer with the lowest latency counts.
            sent, asked = time.time(), time.monotonic()
            at = float(self.ask("hello", LOGIN_S)["at"])
            half_s = (time.monotonic() - asked) / 2
            self.login_s = self.login_s or time.monotonic() - began
            if half_s < self.error_s:
                self.offset_s, self.error_s = at - (sent + half_s), half_s
        self.facts = self.ask("examine", EXAMINE_S, **request)


@contextmanager
def understood(name: str) -> Iterator[None]:
    """Turns a malformed answer into an error: the peer may be another version or program."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DlctlError(
            f"{name} sent an answer that this dlctl does not understand "
            f"({type(error).__name__}: {error})",
            where=name,
            hint="install the same dlctl there",
        ) from error


@contextmanager
def visiting(
    needs: Mapping[str, HostNeed], launcher: Launcher, begun: Mapping[str, Session]
) -> Iterator[Visits]:
    """Closes all sessions at the end. begun: agent -> the session that it has already. Raises
    DlctlError for an invalid host.
    """
    with ExitStack() as ends:
        for own in begun.values():
            ends.callback(own.close)
        found: dict[str, Visit] = {}
        for agent, need in needs.items():
            own = begun.get(agent) or (
                session.here(need.host) if need.is_here else launcher.session(need.host)
            )
            found[agent] = Visit(need, own)
            ends.callback(found[agent].session.close)
        threads = ends.enter_context(ThreadPoolExecutor(min(len(needs), AT_ONCE_MAX)))
        try:
            yield Visits(found, threads, launcher)
        except BaseException:
            for visit in found.values():
                visit.session.interrupt()
            raise


class Visits:
    """All machines, each asked by a thread of its own."""

    def __init__(
        self, found: dict[str, Visit], threads: ThreadPoolExecutor, launcher: Launcher
    ) -> None:
        self.launcher = launcher
        self.token = secrets.token_hex(TOKEN_BYTES)
        self.all = found
        self._threads = threads
        self.began = self.listening_since = time.monotonic()

    def is_usable(self, link: NeededLink) -> bool:
        source, target = self.all[link.source], self.all[link.target]
        return bool(source.facts) and any(target.place(daemon) for daemon in link.daemons)

    def listen(self, job: JobFile, control: str) -> None:
        """Make every machine listen where its daemons will; see `daemons.node.listen`.

        control: the coordinator's address, as "tcp://HOST:PORT".
        """
        self.listening_since = time.monotonic()

        def one(visit: Visit) -> None:
            for request in _listeners(job, visit.need, control):
                answer = visit.ask("listen", LISTEN_S, token=self.token, **request)
                visit.places += answer["places"]

        self.each(one)

    def reach(self, links: list[NeededLink]) -> dict[NeededLink, list[tuple[Facts, Facts]]]:
        """All links in parallel: link -> (place, how it was reached) of each of its daemons."""
        return dict(zip(links, self._threads.map(self._reached, links), strict=True))

    def _reached(self, link: NeededLink) -> list[tuple[Facts, Facts]]:
        places = [p for d in link.daemons if (p := self.all[link.target].place(d))]
        first = {place["told"]: place["name"] for place in reversed(places)}
        targets = [
            {
                "address": place["told"],
                "port": place["port"],
                "token": self.token,
                "is_measured": first[place["told"]] == place["name"],
            }
            for place in places
        ]
        source = self.all[link.source]
        try:
            with understood(source.need.name):
                answer = source.ask("reach", REACH_S * len(targets), targets=targets)
                return [(place, answer["reached"][i]) for i, place in enumerate(places)]
        except DlctlError as error:
            return [(place, {"kind": "lost", "words": error.message}) for place in places]

    def each(self, do: Callable[[Visit], None]) -> None:
        """Do this for all machines that have answered so far; an error ends that of its machine."""

        def attempt(visit: Visit) -> None:
            try:
                with understood(visit.need.name):
                    do(visit)
            except DlctlError as error:
                visit.error = error

        list(self._threads.map(attempt, [v for v in self.all.values() if v.error is None]))


def _listeners(job: JobFile, need: HostNeed, control: str) -> Iterator[Facts]:
    """Listen requests for the coordinator, on its machine, and for the servers."""
    from dlctl.launch import addresses

    host = need.host
    if need.is_here:
        ports, bind = {CONTROL: job.network.port}, addresses.host_of(control)
        yield {"ssh": "", "bind": bind, "data": "", "control": "", "ports": ports}
    if need.servers:
        ports = {name: addresses.port_of(name, job) for name in need.servers}
        bind = host.bind if job.has_other_hosts else addresses.LOOPBACK
        yield {
            "ssh": host.name,
            "bind": bind,
            "data": host.data,
            "control": control,
            "ports": ports,
        }
