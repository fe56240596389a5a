"""The settings of a worker: those that may change while it runs, and the terms of its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlctl.algorithms.base import Method
from dlctl.compress.base import Compressor
from dlctl.job import inner
from dlctl.job.config import JobFile
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.live_values import LiveValues, Place
from dlctl.roles.worker.progress import OwnRate
from dlctl.roles.worker.send_queue import SendQueue
from dlctl.wire import messages as m


@dataclass(frozen=True, eq=False, slots=True)
class WorkTerms:
    """What the job says about the work of a replica."""

    batch_size: int
    """Samples of a step."""
    lease_ahead_s: float
    push_norm_max: float
    """Largest norm of a push that a server accepts."""
    compressor: Compressor
    compression: str
    """The compressor's name."""
    own_rate: OwnRate
    """The learning rate of the replica's own steps; 0 if it makes none."""
    nonfinite_steps_max: int
    """Consecutive discarded gradients after which the replica leaves the run."""
    refused_pushes_max: int
    stops_between_batches: bool = False
    """Whether a gradient can be stopped: it is of several batches, which one process computes."""
    counts_links: bool = False
    """Whether pushes and fetches are reported by peer, because some peers are on other hosts."""
    measures_links: bool = False
    """Whether the times of pushes are reported, for `[servers] layout`."""


class WorkerSettings:
    """Changes of live settings take effect at once, whether the replica has begun or not."""

    def __init__(
        self,
        context: Context,
        name: str,
        job: JobFile,
        method: Method,
        compressor: Compressor,
        send_queue: SendQueue,
    ) -> None:
        """name: the daemon's name."""
        self._job = job
        self._compressor = compressor
        self._limiters = send_queue.limiters
        self.options: Any = method.Options(**job.algorithm.options)
        """The method's options, checked (`Method.Options`)."""
        has_inner = job.inner.name != inner.NONE
        self.own_rate = OwnRate(job.inner.options.get("lr", 1.0)) if has_inner else None
        """The learning rate of the replica's own optimiser; None: it has none. Of a script's
        optimizer only the factor by the schedule is known: its peak is 1."""
        places: dict[str, Place] = {
            **{key: (limiter, "bytes_per_s") for key, limiter in self._limiters.items()},
            "push_window": (send_queue, "push_window_bytes"),
            **{key: (compressor, key) for key in compressor.live},
            **{key: (self.options, key) for key in method.live},
        }
        if self.own_rate is not None and "lr" in job.inner.options:
            places["inner_lr"] = (self.own_rate, "lr")
        self._live = LiveValues(context, name, places)

    def begin(self, settings: m.Json) -> None:
        """Apply the live settings that the run has at the moment."""
        self._live.begin(settings)

    def on_change(self, message: m.ChangeSettings, now: float) -> None:
        for limiter in self._limiters.values():
            limiter.spend(0, now)  # What was paid until now was paid at the old rate.
        self._live.on_change(message)

    def values(self) -> m.Json:
        """All effective live settings."""
        return self._live.values()

    def terms(self, batch_size: int) -> WorkTerms:
        """batch_size: of this worker, before gradients are accumulated."""
        job = self._job
        return WorkTerms(
            batch_size=batch_size * job.gradient.accumulate,
            lease_ahead_s=job.data.lease_ahead_s,
            push_norm_max=job.servers.push_norm_max,
            compressor=self._compressor,
            compression=job.compression.name,
            own_rate=self.own_rate or OwnRate(0.0),
            nonfinite_steps_max=job.workers.nonfinite_steps_max,
            refused_pushes_max=job.workers.refused_pushes_max,
            stops_between_batches=job.gradient.accumulate > 1 and job.ranks == 1,
            counts_links=job.has_other_hosts or job.takes_guests,
            measures_links=job.servers.layout != "equal" and job.servers.recut_s > 0,
        )
