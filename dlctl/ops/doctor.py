"""From a job file to findings about all of its machines; nothing is changed anywhere."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlctl.errors import DlctlError, NotFound
from dlctl.health import needs, network, resources, software
from dlctl.health.findings import FAULT, LINKS, Finding
from dlctl.health.needs import CONTROL, HERE, Link, Need
from dlctl.launch.session import Session
from dlctl.ops import decide, plan
from dlctl.runs import paths
from dlctl.runs.snapshot import Snapshot
from dlctl.util import notes
from dlctl.util.names import HOME_AGENT
from dlctl.util.text import plural

if TYPE_CHECKING:
    from dlctl.config import JobFile


def this_machine() -> list[Finding]:
    """Of a machine without any job."""
    need = needs.NOTHING
    with Visits({HOME_AGENT: need}) as visits:
        visits.examine(lambda _: _request(need, None, None))
        return list(_of_machine(visits.all[HOME_AGENT], {}, {}))


def job(file: Path, job: JobFile, only_host: str | None) -> list[Finding]:
    """Of all machines of a job, or of this one and one other, and of what is between them.

    Raises NotFound if the job has no host of this name.
    """
    from dlctl.launch import addresses

    wanted = _wanted(needs.of(job, plan.known_model(file, job)), only_host)
    newest = decide.newest(file, job)
    run = newest if newest is not None and newest.is_live else None
    others = len(wanted) - 1
    if others:
        notes.note(f"logs in to {plural(others, 'host')}, and measures the links between them ...")
    with Visits(wanted) as visits:
        visits.examine(lambda need: _request(need, job, file))
        control, unknown = "", None
        if job.has_other_hosts:
            try:
                control = addresses.of_coordinator("", job).bind
            except DlctlError as error:
                unknown = error
        elif job.uses_tcp:
            control = f"tcp://{addresses.LOOPBACK}:{job.network.port or '*'}"
        if control:
            visits.listen(_listening(job, wanted, control))
        return [*_machines(visits, job, run, unknown), *_links(visits, job)]


def _wanted(all_needs: dict[str, Need], only_host: str | None) -> dict[str, Need]:
    if only_host is None:
        return all_needs
    names = [need.name for need in all_needs.values()]
    if only_host not in names:
        raise NotFound(f'the job has no host "{only_host}"; it has {", ".join(names)}')
    return {a: need for a, need in all_needs.items() if need.name in (HERE, only_host)}


def _request(need: Need, job: JobFile | None, file: Path | None) -> dict[str, Any]:
    """What is to be looked at on this machine in particular."""
    folder = str(paths.index_dir().parent) if need.is_here else ""
    if job is not None and file is not None and need.is_here:
        folder = os.path.abspath(file.parent / job.job.run_dir)
    state_dir = job.servers.state_dir if job is not None and need.servers else ""
    return {
        "dir": need.host.dir,
        "folder": folder,
        "state_dir": state_dir,
        "needs_torch": job is None or need.workers > 0,
    }


def _listening(
    job: JobFile, wanted: Mapping[str, Need], control: str
) -> dict[str, list[dict[str, Any]]]:
    from dlctl.launch import addresses

    asked: dict[str, list[dict[str, Any]]] = {}
    for agent, need in wanted.items():
        ports = {name: addresses.port_of(name, job) for name in need.servers}
        request = listen_request(need, control, ports)
        if not job.has_other_hosts:
            request = {**request, "bind": addresses.LOOPBACK}
        asked[agent] = [request] if ports else []
    own = control_request(addresses.host_of(control), job.network.port)
    asked[HOME_AGENT] = [own, *asked[HOME_AGENT]]
    return asked


# ---------------------------------------------------------------- findings


def _machines(
    visits: Visits, job: JobFile, run: Snapshot | None, unknown: DlctlError | None
) -> Iterator[Finding]:
    here = visits.all[HOME_AGENT].facts
    for agent, visit in visits.all.items():
        yield from _of_machine(visit, here, _held_by(run, agent))
        if agent != HOME_AGENT:
            continue
        if keys := network.keys(job, visit.need.name):
            yield keys
        if unknown is not None:
            yield _fault(visit.need.name, CONTROL, unknown)
        elif job.slurm.nodes:
            yield from _slurm(visit.need.name, job.slurm.partition)


def _slurm(here: str, partition: str) -> Iterator[Finding]:
    from dlctl.launch import slurmcalls

    try:
        slurmcalls.nodes(partition)
    except DlctlError as error:
        yield _fault(here, "Slurm", error)


def _of_machine(
    visit: Visit, here: Mapping[str, Any], run_of: Mapping[int, str]
) -> Iterator[Finding]:
    need = visit.need
    if visit.error is not None:
        yield _fault(need.name, "dlctl" if need.is_here else "ssh", visit.error)
        return
    if not need.is_here:
        yield resources.login(need, visit.login_s)
        yield resources.clock(need, visit.offset_s, visit.error_s)
    told: list[Finding] = []
    try:
        with understood(need.name):
            for finding in _of_facts(visit, here or visit.facts, run_of):
                told.append(finding)
    except DlctlError as error:
        told.append(_fault(need.name, "facts", error))
    yield from told
    if visit.place_error is not None:
        yield _fault(need.name, "address", visit.place_error)


def _of_facts(
    visit: Visit, here: Mapping[str, Any], run_of: Mapping[int, str]
) -> Iterator[Finding]:
    need, facts = visit.need, visit.facts
    yield from software.findings(need, facts, here)
    yield from resources.findings(need, facts)
    yield network.firewall(need, facts)
    yield from network.listening(need, facts, visit.places, run_of)


def _fault(place: str, subject: str, error: DlctlError) -> Finding:
    return Finding(place, subject, FAULT, error.message, error.hint or "see above")


def _held_by(run: Snapshot | None, agent: str) -> dict[int, str]:
    """pid -> who of the living run of this job it is, on the machine of this agent."""
    if run is None:
        return {}
    rows = [row for row in run.daemons if row.get("agent", HOME_AGENT) == agent]
    if agent == HOME_AGENT:
        rows.append(run.coordinator)
    return {row["pid"]: f"{row['name']} of {run.run_id}" for row in rows if row.get("pid")}


def _links(visits: Visits, job: JobFile) -> Iterator[Finding]:
    """One round of measurements after the other; told in the order of the job file."""
    planned = needs.links({agent: visit.need for agent, visit in visits.all.items()})
    usable = [link for link in planned if _is_usable(visits, link)]
    reached: dict[Link, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for at_once in needs.rounds(usable):
        if not visits.is_late:
            reached |= visits.reach(at_once)
    for link in planned:
        if link in usable and link not in reached:
            source, target = visits.all[link.source].need, visits.all[link.target].need
            yield network.not_reached(source, target)
        for place, answer in reached.get(link, []):
            yield _of_link(visits, link, place, answer, job)


def _of_link(
    visits: Visits, link: Link, place: dict[str, Any], answer: dict[str, Any], job: JobFile
) -> Finding:
    source, target = visits.all[link.source].need, visits.all[link.target].need
    facts, fixed_port = visits.all[link.target].facts, bool(job.network.port)
    try:
        with understood(source.name):
            return network.link(source, target, facts, place, answer, fixed_port)
    except DlctlError as error:
        return _fault(LINKS, f"{source.name} -> {target.name}", error)


def _is_usable(visits: Visits, link: Link) -> bool:
    source, target = visits.all[link.source], visits.all[link.target]
    return source.error is None and any(target.place(daemon) for daemon in link.daemons)


# ---------------------------------------------------------------- the machines
# The machines of a job, each in a conversation over its own login: asked, connected, measured.
#
# What they answer are facts (`daemons.node.probe`); what these mean is in `dlctl.health`.


TOKEN_BYTES = 32
LOGIN_S, EXAMINE_S, LISTEN_S, REACH_S = 30.0, 120.0, 10.0, 30.0
LISTENING_S = 45.0
"""A listener lives for a minute."""
HELLOS = 3
AT_ONCE_MAX = 64
Facts = dict[str, Any]


@dataclass
class Visit:
    """One machine, and what is known of it so far."""

    agent: str
    need: Need
    session: Session
    error: DlctlError | None = None
    """Why nothing more is known."""
    login_s: float = 0.0
    """Until its first answer."""
    offset_s: float = 0.0
    """How much later it is there, and by how much that may be wrong."""
    error_s: float = 0.0
    facts: Facts = field(default_factory=dict)
    places: list[Facts] = field(default_factory=list)
    """Where its daemons could listen, or why not."""
    place_error: DlctlError | None = None

    def place(self, daemon: str) -> Facts | None:
        """Where somebody listens for this daemon now; None: nobody does."""
        return next((p for p in self.places if p["name"] == daemon and "told" in p), None)


@contextmanager
def understood(name: str) -> Iterator[None]:
    """The other end may be another version, or anybody: what has not the right form is no bug."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DlctlError(
            f"{name} has answered something that this dlctl does not know "
            f"({type(error).__name__}: {error})",
            where=name,
            hint="install the same dlctl there",
        ) from error


class Visits:
    """With `with`; afterwards all conversations are over."""

    def __init__(self, needs: Mapping[str, Need]) -> None:
        """Raises UsageError for what is no host."""
        self.token = secrets.token_hex(TOKEN_BYTES)
        self._began = self._listening_since = time.monotonic()
        self._ends = ExitStack()
        self.all: dict[str, Visit] = {}
        with ExitStack() as ends:
            for agent, need in needs.items():
                visit = Visit(agent, need, Session(need.host))
                ends.callback(visit.session.close)
                self.all[agent] = visit
            threads = ends.enter_context(ThreadPoolExecutor(min(len(needs), AT_ONCE_MAX)))
            self._threads = threads
            self._ends = ends.pop_all()

    def __enter__(self) -> Visits:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for visit in self.all.values():
                visit.session.interrupt()
        self._ends.close()

    @property
    def good(self) -> list[Visit]:
        """Those that have answered so far."""
        return [visit for visit in self.all.values() if visit.error is None]

    @property
    def is_late(self) -> bool:
        """Whether listeners may be gone before one more measurement is over."""
        return time.monotonic() - self._listening_since > LISTENING_S

    # ------------------------------------------------------------ questions

    def examine(self, request: Callable[[Need], Facts]) -> None:
        """`request`: what is special about a machine; see `daemons.node.examine`."""

        def one(visit: Visit) -> None:
            try:
                with understood(visit.need.name):
                    self._meet(visit)
                asked = {"verb": "examine", **request(visit.need)}
                visit.facts = visit.session.ask(asked, EXAMINE_S)
            except DlctlError as error:
                visit.error = error

        self._each(one, self.all.values())

    def _meet(self, visit: Visit) -> None:
        """Several times: by the quickest answer the clocks are compared."""
        for number in range(HELLOS):
            sent, began = time.time(), time.monotonic()
            at = float(visit.session.ask({"verb": "hello"}, LOGIN_S)["at"])
            took_s = time.monotonic() - began
            if not number:
                visit.login_s = time.monotonic() - self._began
            if not number or took_s / 2 < visit.error_s:
                visit.offset_s, visit.error_s = at - (sent + took_s / 2), took_s / 2

    def listen(self, requests: Mapping[str, list[Facts]]) -> None:
        """Agent -> where its machine is to listen; see `daemons.node.listening`."""

        self._listening_since = time.monotonic()

        def one(visit: Visit) -> None:
            for request in requests.get(visit.agent, []):
                asked = {"verb": "listen", "token": self.token, **request}
                try:
                    with understood(visit.need.name):
                        visit.places += visit.session.ask(asked, LISTEN_S)["places"]
                except DlctlError as error:
                    visit.place_error = error

        self._each(one, self.good)

    def reach(self, links: Iterable[Link]) -> dict[Link, list[tuple[Facts, Facts]]]:
        """All of them at once: link -> (place, how it was reached) of each of its daemons."""
        found: dict[Link, list[tuple[Facts, Facts]]] = {}

        def one(link: Link) -> None:
            places = [p for d in link.daemons if (p := self.all[link.target].place(d))]
            found[link] = list(zip(places, self._reached(link, places), strict=True))

        self._each(one, links)
        return found

    def _reached(self, link: Link, places: list[Facts]) -> list[Facts]:
        if not places:
            return []
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
        try:
            asked = {"verb": "reach", "targets": targets}
            source = self.all[link.source]
            with understood(source.need.name):
                reached = list(source.session.ask(asked, REACH_S * len(targets))["reached"])
                return [reached[number] for number in range(len(places))]
        except DlctlError as error:
            return [{"kind": "lost", "words": error.message}] * len(places)

    def _each(self, do: Callable[[Any], None], whom: Iterable[Any]) -> None:
        for future in [self._threads.submit(do, each) for each in whom]:
            future.result()


def listen_request(need: Need, control: str, ports: Mapping[str, int]) -> Facts:
    """`control`: the coordinator's address for others, as "tcp://HOST:PORT"."""
    host = need.host
    return {
        "ssh": host.ssh,
        "bind": host.bind,
        "data": host.data,
        "control": control,
        "ports": dict(ports),
    }


def control_request(address: str, port: int) -> Facts:
    """Listen where the coordinator would."""
    return {"ssh": "", "bind": address, "data": "", "control": "", "ports": {CONTROL: port}}
