"""The coordinator's CPU time per event, and that of a start, against the number of workers.

The real role in virtual time: daemons that only answer, and report every second. Its effects are
not performed, so neither sockets nor the database are measured. The figures are ratios between two
sizes of a run: a coordinator whose events cost the same in runs of all sizes has 1.0 for a report,
and 3.0 for a start of three times as many workers.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from statistics import median

from benchmarks.figures import Figure, ratio
from dlctl import registry
from dlctl.job.config import Choice, Data, Job, JobFile, Servers, Stop, Timeouts, Workers
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.records import LaunchAgent
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import DeadlineReached, Effect, Event, Received, Send, Started

SIZES, START_SIZES = (100, 300, 1000), (100, 300)
REPORT_ASKED, START_ASKED = 1.5, 3.0
SAMPLES = 100_000_000
PORTION_S = 20.0
"""From a lease to the next one."""
COME_S = 1.0
"""From the first worker that has started to the last one."""
BUILD_S, LINK_S = 0.5, 0.001
SETTLE_S = 3.0
"""After the release, before anything is measured."""
RUN_ID = "crowd"
LAYOUT = Layout((TensorEntry("weight", TRAINED, (10,), "float32", ()),)).to_bytes()


@dataclass
class Crowd:
    """A run in virtual time: a coordinator, an agent, two servers and many workers."""

    workers: int
    now: float = 1.0
    reports: int = 0
    cpu_s: float = 0.0
    """Of the coordinator so far."""
    _coming: list[tuple[float, int, Received]] = field(default_factory=list)
    _terms: dict[str, int] = field(default_factory=dict)
    _alive: dict[str, int] = field(default_factory=dict)
    """Name -> incarnation of a process that reports."""
    _requests: dict[str, int] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        job = JobFile(
            job=Job(name="crowd", task="train.py:task", stop=Stop(epochs=100)),
            algorithm=Choice(name="downpour"),
            servers=Servers(count=2),
            workers=Workers(count=self.workers, batch_size=32),
            data=Data(portion_batches=4),
            timeouts=Timeouts(ready_s=3600.0),
        )
        method = registry.load("algorithms", "downpour")
        self.machine = Coordinator(RUN_ID, job, Keyring(b"key"), method, Past())

    def start(self) -> float:
        """Seconds of the coordinator's CPU until all workers are released."""
        self._handle(Started())
        while not self.machine.run.is_working:
            self._step()
        return self.cpu_s

    def train(self, seconds: float) -> float:
        """Seconds of the coordinator's CPU per report of a daemon."""
        until, self.reports, before_s = self.now + seconds, 0, self.cpu_s
        while self.now < until:
            self._step()
        return (self.cpu_s - before_s) / self.reports

    # ------------------------------------------------------------ virtual time

    def _step(self) -> None:
        deadline = self.machine.deadline()
        if deadline is not None and (not self._coming or deadline <= self._coming[0][0]):
            self.now = max(self.now, deadline)
            self._handle(DeadlineReached())
            return
        self.now, _, event = heapq.heappop(self._coming)
        if isinstance(event.message, m.Report):
            self.reports += 1
            self._say(event.message.name, event.message, 1.0)
        self._handle(event)

    def _handle(self, event: Event) -> None:
        began = time.thread_time()
        effects = self.machine.handle(event, self.now)
        self.machine.deadline()
        self.cpu_s += time.thread_time() - began
        for effect in effects:
            self._perform(effect)

    def _say(self, name: str, message: m.Message, after_s: float = LINK_S) -> None:
        self._count += 1
        row = (self.now + after_s, self._count, Received(name.encode(), message))
        heapq.heappush(self._coming, row)

    # ------------------------------------------------------------ the daemons

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, LaunchAgent):
            self._register(effect.name, "agent", effect.incarnation, BUILD_S)
        elif isinstance(effect, Send) and isinstance(effect.peer, bytes):
            self._hear(effect.peer.decode(), effect.message)

    def _register(self, name: str, role: str, incarnation: int, after_s: float) -> None:
        self._alive[name] = incarnation
        message = m.Register(RUN_ID, role, name, incarnation, self._count + 2, "here", "0")
        self._say(name, message, after_s)
        if role == "agent":
            self._say(name, self._report(name), after_s + 1.0)

    def _hear(self, name: str, message: m.Message) -> None:
        match message:
            case m.Spawn(child, role, incarnation):
                self._say(name, m.Spawned(child, incarnation, 1000 + len(self._alive)))
                comes_s = COME_S * len(self._alive) / self.workers
                self._register(child, role, incarnation, BUILD_S + comes_s)
            case m.Welcome(_, _, term):
                self._terms[name] = term
                self._say(name, self._report(name), 1.0)
                if name.startswith("worker"):
                    self._say(name, m.ModelReady(name, LAYOUT, SAMPLES), BUILD_S)
            case m.AllowedPeers(number):
                self._say(name, m.Noted(name, "allowed_peers", number))
            case m.Peers(number):
                self._say(name, m.Noted(name, "peers", number))
            case m.Assign():
                self._say(name, m.Serving(name, f"sim://{name}", True))
            case m.Topology() if name not in self._requests:
                self._ask_for_data(name, LINK_S)
            case m.Lease(request, portion, data_epoch, start, stop) if (
                request == self._requests[name]
            ):
                slot, steps = int(name.partition("-")[2]), -(-(stop - start) // 32)
                done = m.PortionDone(
                    slot, self._terms[name], data_epoch, portion, steps, stop - start, 1.0
                )  # fmt: skip
                self._say(name, done, PORTION_S)
                self._ask_for_data(name, PORTION_S)

    def _ask_for_data(self, name: str, after_s: float) -> None:
        self._requests[name] = self._requests.get(name, 0) + 1
        slot, request = int(name.partition("-")[2]), self._requests[name]
        self._say(name, m.LeaseRequest(slot, self._terms[name], request, False), after_s)

    def _report(self, name: str) -> m.Report:
        metrics: m.Json = {"push_bytes": 1000, "fetch_bytes": 1000, "pushes": 1}
        if name.startswith("worker"):
            metrics |= {"samples_per_s": 100.0, "portions": 1, "loss": 1.0, "lr": 0.1}
        return m.Report(name, self._alive[name], "computing", "", metrics)


def measure(*, quick: bool) -> list[Figure]:
    sizes, starts, rounds, long_s = SIZES, START_SIZES, 3, 5.0
    if quick:
        sizes, starts, rounds, long_s = (4, 12), (4, 12), 1, 2.0
    reports_s: dict[int, list[float]] = {size: [] for size in sizes}
    starts_s: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            crowd = Crowd(size)
            starts_s[size].append(crowd.start())
            crowd.train(SETTLE_S)
            reports_s[size].append(crowd.train(long_s))
    few = sizes[0]
    figures = [
        ratio(
            "coordinator", f"a report of {size:,} workers / of {few}", reports_s[size],
            reports_s[few], REPORT_ASKED,
        )
        for size in sizes[1:]
    ]  # fmt: skip
    few, many = starts
    what = f"the start of {many} workers / of {few}"
    figures.append(ratio("coordinator", what, starts_s[many], starts_s[few], START_ASKED))
    most, size = 1.0 / median(reports_s[sizes[-1]]), sizes[-1]
    what = f"reports per second of CPU, {size:,} workers"
    return [*figures, Figure("coordinator", what, "", (most,))]
