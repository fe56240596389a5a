"""The machines of a job, each in a conversation over its own login: asked, connected, measured.

What they answer are facts (`daemons.node.probe`); what these mean is in `dlctl.health`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dlctl.errors import DlctlError
from dlctl.health.needs import CONTROL, Link, Need
from dlctl.launch.session import Session

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
