"""The agents of a run, each in a Slurm job of its own (`jobs = "each"`).

Slurm queues, starts, preempts and requeues every one of them on its own; a job that has lost its
node, and is not requeued, is submitted again with the next order. That is no failure of the agent:
it is reported as `base.Taken`, and a notice as `base.Going`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from dlctl.job.config import Host
from dlctl.launch import base, slurmcalls
from dlctl.launch.slurmagents import SlurmAgents
from dlctl.launch.slurmrequest import SlurmRequest

POLL_S = 2.0
POLLS_PER_S = 5.0
"""Queries of Slurm's controller, over all jobs of the run."""


class SlurmJobs:
    def __init__(
        self,
        asked: SlurmRequest,
        directory: Path,
        hosts: Mapping[str, Host],
        watcher: base.Watcher,
        tell: Callable[[base.News], None],
    ) -> None:
        self.directory = directory
        self.watcher = watcher
        self.tell = tell
        # A job may wait for as long as it takes: the run trains with the others.
        self._asked = replace(asked, nodes=1, queue_s=math.inf)
        self._hosts = {name: {name: host} for name, host in hosts.items()}
        self._poll_s = max(POLL_S, len(hosts) / POLLS_PER_S)
        self._incarnations: dict[str, int] = {}
        """Agent -> its newest incarnation."""
        self._jobs = {name: self._job(name) for name in hosts}

    def _job(self, name: str) -> SlurmAgents:
        return SlurmAgents(
            self._asked, self.directory, self._hosts[name], self.watcher,
            partial(self._on_news, name), only=name, poll_s=self._poll_s,
        )  # fmt: skip

    def _on_news(self, name: str, news: base.News) -> None:
        if not isinstance(news, base.Notice):
            self.tell(news)
            return
        incarnation = self._incarnations.get(name, 0)
        if news.kind == "over":
            self.tell(base.Taken(name, incarnation, news.reason))
        else:
            self.tell(base.Going(name, incarnation, news.reason))

    # ------------------------------------------------------------ calls of the coordinator

    def start(self, order: base.StartOrder) -> None:
        self._incarnations[order.name] = order.incarnation
        job = self._jobs[order.name]
        if job.is_over:
            job.forget()
            job = self._jobs[order.name] = self._job(order.name)
        job.start(order)

    def kill(self, name: str) -> None:
        self._jobs[name].kill(name)

    def adopt(self, recorded: dict[str, int]) -> dict[str, int]:
        self._incarnations |= {name: recorded[name] for name in self._jobs if name in recorded}
        for job in self._jobs.values():
            job.adopt(recorded)
        return {}

    def look(self) -> None:
        for job in list(self._jobs.values()):
            job.look()

    def close(self) -> None:
        for job in self._jobs.values():
            job.settle()
        slurmcalls.end_in_words(self.directory)
