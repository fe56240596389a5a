"""What `dlctl simulate` asks the simulator for; as JSON between their processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlctl.errors import UsageError
from dlctl.util import units

LATENCY_S = 0.0005
"""Of a link in one building."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """The network card of each machine: a rate in bytes per second, both ways, and the latency
    between two machines in seconds.
    """

    bytes_per_s: float
    latency_s: float

    @classmethod
    def parse(cls, text: str) -> LinkSpeed:
        """ "100Mbit/s" or "100Mbit/s,5ms". Raises UsageError."""
        rate, _, latency = text.partition(",")
        try:
            bytes_per_s = units.parse_rate(rate.strip())
            latency_s = units.parse_duration(latency) if latency else LATENCY_S
        except ValueError as error:
            raise UsageError(
                f"--link: {error}", hint="dlctl simulate --link 100Mbit/s,5ms"
            ) from None
        if not bytes_per_s:
            raise UsageError("--link: a link has a rate", hint="without --link it is not limited")
        return cls(bytes_per_s=bytes_per_s, latency_s=latency_s)


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    directory: str
    """The run directory, with job.json: where the simulated run goes."""
    seed: int = 0
    until_s: float = 30 * 86_400.0
    """Virtual seconds after which it gives up."""
    step_s: float | None = None
    """Median of a step; None: only measure a step, an evaluation and a build on this machine."""
    evaluation_s: float = 0.0
    build_s: float = 1.0
    """From the start of a worker's process until its model is there."""
    spread: float = 0.1
    """Standard deviation of the logarithm of a step's duration."""
    times: Mapping[str, Any] = field(default_factory=dict)
    """Worker, or "*" for the others -> kind of work -> `records.work_times`: durations of a real
    run, in place of those above."""
    core_share: float = 1.0
    """The part of a step for which a core is needed."""
    loops: Mapping[str, Any] = field(default_factory=dict)
    """Role -> `records.work_times.LoopTimes` of a real run: what handling events costs."""
    wake_s: Mapping[str, float] = field(default_factory=dict)
    """Role -> how long its threads wait for a core each time that they have something to do, beside
    what they wait for each other."""
    cores: int = 0
    """Of each machine. 0: as many as this one has or, with times of a run, as that one had."""
    latency_s: float = 5e-5
    """One way, between any two daemons, unless there is a link."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Worker -> factor by which it is slower."""
    link: LinkSpeed | None = None
    """Of every daemon's machine. None: all daemons are on one machine, or on the job's hosts."""
    protocol_s: float | None = None
    """Not None: no gradients, only a window of `until_s` virtual seconds, for which it takes at
    most so many of CPU time."""
    parameters: int = 0
    """Of the model, for that."""
    is_plain: bool = False
    """No roles of dlctl: one torch process, or DDP if there are several workers."""
    kill_every_s: Mapping[str, float] = field(default_factory=dict)
    """Role -> mean time between two kills of a daemon of that role."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> SimulationRequest:
        link = values["link"]
        return cls(**{**values, "link": None if link is None else LinkSpeed(**link)})
