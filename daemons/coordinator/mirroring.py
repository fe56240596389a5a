"""The process that uploads checkpoints (`daemons/mirror/`), as the coordinator sees it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from daemons.coordinator.delivery_process import DeliveryProcess
from daemons.coordinator.records import Exporter, Outcome
from daemons.loop import Loop
from dlctl.observe.delivery import Delivery
from dlctl.roles.coordinator.records import HurryMirror, MirrorCheckpoint
from dlctl.roles.protocol.effects import MirrorNews
from dlctl.runs import checkpoints

ANSWER_S = 300.0
"""Without any progress, the process is killed."""
PAUSE_MAX_S = 60.0
"""Between two processes, while all fail."""
KEYS = ("number", "step", "nbytes")


class Mirroring(Exporter):
    """Is tended as the exporters of figures are; what it has to say are events for the machine."""

    def __init__(self, directory: Path, loop: Loop) -> None:
        self._loop = loop
        self._delivery = Delivery(ANSWER_S, PAUSE_MAX_S)
        self._mirrored: dict[str, Any] = {}
        self._age_s = 0.0
        self._why = self._cause = ""
        self._asked = 0
        self._sent = (0, 0)
        self._posted: MirrorNews | None = None
        module = ["daemons.mirror", str(directory), str(os.getpid())]
        self._process = DeliveryProcess(
            "the mirror", module, self._delivery, self._tell, self._take
        )
        if newest := checkpoints.highest_number(directory):
            self._ask(newest)
        loop.perform(MirrorCheckpoint, self._on_checkpoint)
        loop.perform(HurryMirror, lambda _: self._delivery.hurry())

    def _on_checkpoint(self, effect: MirrorCheckpoint) -> None:
        self._ask(effect.number)

    def _ask(self, number: int) -> None:
        self._asked = number
        self._process.add({"checkpoint": number})

    def tend(self) -> None:
        self._process.tend(time.monotonic())
        self._post()

    def close(self, outcome: Outcome | None) -> None:
        """The end of the run has waited for it. What it has not uploaded the next process will."""
        self._process.end()

    def _tell(self, why: str, dropped: int) -> None:
        self._why = why
        if not why:
            self._cause = ""

    def _take(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self._cause = str(answer.get("cause", ""))
        if answer.get("mirrored"):
            found = answer["mirrored"]
            self._mirrored = {key: found[key] for key in KEYS}
            self._age_s = max(0.0, time.time() - found["at"])
        self._sent = (answer.get("sent", 0), answer.get("nbytes", 0))

    def _post(self) -> None:
        """Tell the machine what is new."""
        pending = self._delivery.pending > 0
        news = MirrorNews(
            self._mirrored, self._age_s, self._asked, pending, self._sent, self._why, self._cause
        )
        if news != self._posted:
            self._posted = news
            self._loop.post(news)
