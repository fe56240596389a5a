"""The agents of a run, each in a Slurm job of its own (`jobs = "each"`).

Slurm queues, starts, preempts and requeues every one of them on its own; a job that has lost its
node, and is not requeued, is submitted again with the next order. That is no failure of the agent:
it is reported as `base.Taken`, and a notice as `base.Going`. An agent that has no workers gets no
job: `dlctl scale` changes the number of jobs, up to `nodes`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
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
UNWANTED = "no worker is to run there"


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
        self._wanted: Collection[str] = tuple(hosts)
        self._held: dict[str, base.StartOrder] = {}
        """Orders for agents that have no workers."""
        self._held_at = 0.0
        """When their coordinator was told so last."""

    def _job(self, name: str) -> SlurmAgents:
        return SlurmAgents(
            self._asked, self.directory, self._hosts[name], self.watcher,
            partial(self._on_news, name), only=name, poll_s=self._poll_s,
        )  # fmt: skip

    def _on_news(self, name: str, news: base.News) -> None:
        if name in self._held:
            return  # Of the job before, whose end is known.
        if isinstance(news, base.Ended) and name not in self._wanted:
            self.tell(base.Taken(name, news.incarnation, UNWANTED))  # It was cancelled.
            return
        if not isinstance(news, base.Notice):
            self.tell(news)
            return
        incarnation = self._incarnations.get(name, 0)
        if news.kind == "over":
            self.tell(base.Taken(name, incarnation, news.reason))
        else:
            self.tell(base.Going(name, incarnation, news.reason))

    # ------------------------------------------------------------ calls of the coordinator

    def want(self, names: Collection[str]) -> None:
        before, self._wanted = self._wanted, names
        for name in self._jobs:
            if name not in names:
                if name in before:
                    self._jobs[name].cancel()
                continue
            self._jobs[name].keep()
            if name in self._held:
                self.start(self._held[name])  # Unless its last job is still being ended.

    def start(self, order: base.StartOrder) -> None:
        self._incarnations[order.name] = order.incarnation
        self._held.pop(order.name, None)
        job = self._jobs[order.name]
        if order.name not in self._wanted or job.is_ending:
            self._held[order.name] = order
            self.tell(base.Waiting(order.name, order.incarnation, self._why_held(order.name)))
            return
        if job.is_over:
            job.forget()
            job = self._jobs[order.name] = self._job(order.name)
        job.start(order)

    def kill(self, name: str) -> None:
        self._held.pop(name, None)
        self._jobs[name].kill(name)

    def adopt(self, recorded: dict[str, int]) -> dict[str, int]:
        self._incarnations |= {name: recorded[name] for name in self._jobs if name in recorded}
        for job in self._jobs.values():
            job.adopt(recorded)
        return {}

    def _why_held(self, name: str) -> str:
        return "its last job is being ended" if name in self._wanted else UNWANTED

    def look(self) -> None:
        if self._held and time.monotonic() >= self._held_at + POLL_S:
            self._held_at = time.monotonic()
            for order in list(self._held.values()):
                self.start(order)
        for job in list(self._jobs.values()):
            job.look()

    def close(self) -> None:
        for job in self._jobs.values():
            job.settle()
        slurmcalls.end_in_words(self.directory)
