"""What handling an event costs the daemon of a role, in CPU seconds.

The costs are those that a real run has recorded; the table below has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dlctl.records.work_times import LoopTimes
from dlctl.sim.cores import Cores, SimThread
from dlctl.sim.process import Process
from dlctl.wire.kinds import kind_of, nbytes_of
from dlctl.wire.machine import Event

AROUND_S = {"coordinator": 3.2e-4, "server": 1.8e-4, "worker": 1.8e-4, "agent": 3.2e-4}
"""Of each event beside its handling: waiting, reading, decoding, sending. This and the next table
are what the daemons of a run of the digits example have recorded, with sync, four workers and two
servers on two cores of a machine that had other work as well."""
HANDLING_S = {
    "server": {"Push": 3.3e-4, "Fetch": 6e-5, "FetchBuffers": 8e-5, "DeadlineReached": 1.7e-4},
    "worker": {
        "Computed": 3.4e-4, "Parameters": 1.6e-4, "Ack": 9e-5, "Lease": 8e-5,
        "PortionNoted": 7e-5, "EvaluationRun": 1.7e-4, "DeadlineReached": 3.4e-4,
    },
    "coordinator": {
        "LeaseRequest": 5.3e-4, "PortionDone": 4.6e-4, "Report": 3e-4, "Evaluated": 5e-4,
        "DeadlineReached": 5.8e-4,
    },
}  # fmt: skip
"""Role -> kind of event -> seconds, less what its bytes cost."""
OTHERS_S = 1e-4
BYTE_S = 2.2e-10
"""Of each byte of arrays, in every role: what numpy took to copy 4 million float32, check that
they are finite, and add them."""


@dataclass(frozen=True, slots=True)
class HandlingCosts:
    """recorded: role -> what the loops of that role did in a real run."""

    recorded: Mapping[str, LoopTimes] = field(default_factory=dict)
    payload_scale: float = 1.0
    """The arrays of the run are larger by this factor than those of the messages."""

    def of(self, role: str, event: Event) -> float:
        """CPU seconds."""
        kind, nbytes = kind_of(event), nbytes_of(event, self.payload_scale)
        times = self.recorded.get(role)
        if times is None:
            around_s, found = AROUND_S.get(role, AROUND_S["worker"]), None
        else:
            around_s, found = times.around_s, times.handled.get(kind)
        if found is None or not found.count:
            fixed_s = HANDLING_S.get(role, {}).get(kind, OTHERS_S)
            return around_s + fixed_s + BYTE_S * nbytes
        usual_s, usual_bytes = found.cpu_s / found.count, found.nbytes / found.count
        # Another size than in that run: never cheaper than a third of what was seen.
        own_s = max(usual_s / 3, usual_s + BYTE_S * (nbytes - usual_bytes))
        return around_s + own_s


@dataclass(slots=True)
class ThreadWaits:
    """Of threads."""

    seconds: float = 0.0
    """How long they were ready and had no core."""
    wakes: int = 0


class Handling:
    """Makes the processes of a simulated run take time on the cores of their machines."""

    def __init__(
        self,
        costs: HandlingCosts,
        cores: int,
        machine_of: Callable[[Process], str],
        wake_s: Mapping[str, float] | None = None,
    ) -> None:
        """cores: of each machine. wake_s: role -> how long its threads take to wake up."""
        self.costs = costs
        self._count = cores
        self._machine_of = machine_of
        self._wake_s = wake_s or {}
        self._threads: list[tuple[str, SimThread]] = []
        """All that ever were, with their roles."""
        self.machines: dict[str, Cores] = {}
        self._loops: dict[Process, SimThread] = {}

    def busy_s(self) -> dict[str, float]:
        """Name of a living process -> CPU time of its loop so far."""
        return {process.name: loop.used_s for process, loop in self._loops.items() if process.alive}

    def waits(self) -> dict[str, ThreadWaits]:
        """By role."""
        found: dict[str, ThreadWaits] = {}
        for role, thread in self._threads:
            waits = found.setdefault(role, ThreadWaits())
            waits.seconds += thread.waited_s
            waits.wakes += thread.wakes
        return found

    def take_over(self, process: Process) -> None:
        """From now on its events wait for its loop, which needs a core."""
        loop = self._loops[process] = self.thread(process)
        role = _role_of(process)

        def schedule(event: Event, handle: Callable[[], None]) -> None:
            loop.run(self.costs.of(role, event), handle)

        process.schedule = schedule

    def thread(self, process: Process) -> SimThread:
        """A new one of this process."""

        def cores() -> Cores:
            name = self._machine_of(process)
            if name not in self.machines:
                self.machines[name] = Cores(process.timeline, self._count)
            return self.machines[name]

        role = _role_of(process)
        thread = SimThread(cores, lambda: process.alive, self._wake_s.get(role, 0.0))
        self._threads.append((role, thread))
        return thread

    def offer(self, process: Process, thread: SimThread, event: Event) -> None:
        """Handle an event in another thread of the process at once, if its loop is idle
        (`daemons/loop.py`).
        """
        if not self._loops[process].is_idle:
            process.post(event)
            return
        role = _role_of(process)
        cost_s = self.costs.of(role, event)
        thread.run(cost_s, lambda: process.handle_now(event), next_up=True)


def _role_of(process: Process) -> str:
    return process.name.partition("-")[0]
