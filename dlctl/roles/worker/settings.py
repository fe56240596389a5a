"""The live settings of a worker, and the object that has each of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dlctl.compress.base import Compressor
from dlctl.machine import Configure
from dlctl.messages import Json
from dlctl.roles.protocol.context import Context
from dlctl.roles.worker.progress import OwnRate
from dlctl.roles.worker.send_queue import SendQueue


class WorkerSettings:
    def __init__(
        self,
        context: Context,
        options: Any,
        live: Collection[str],
        send_queue: SendQueue,
        compressor: Compressor,
        own_rate: OwnRate | None = None,
    ) -> None:
        """options: the method's; live: those of them that may change. The compressor lists its live
        attributes in `live`. own_rate: of the replica's own optimiser, if it has one.
        """
        self.context = context
        self.options = options
        self.live = live
        self.send_queue = send_queue
        self.limiters = send_queue.limiters
        self.compressor = compressor
        self.of_compressor: Collection[str] = getattr(compressor, "live", {})
        self.own_rate = own_rate
        self.log_level = "info"

    def values(self) -> Json:
        """All effective live settings."""
        values = {key: getattr(self.options, key) for key in self.live}
        values |= {direction: limiter.bytes_per_s for direction, limiter in self.limiters.items()}
        values["push_window"] = self.send_queue.push_window_bytes
        values |= {key: getattr(self.compressor, key) for key in self.of_compressor}
        if self.own_rate is not None:
            values["inner_lr"] = self.own_rate.lr
        return values | {"log_level": self.log_level}

    def apply(self, settings: Json, now: float) -> None:
        """Apply these; a key that this worker does not have is ignored."""
        for key, value in settings.items():
            if key in self.live:
                setattr(self.options, key, value)
            elif key in self.limiters:
                self.limiters[key].change(value, now)
            elif key == "push_window":
                self.send_queue.push_window_bytes = value
            elif key in self.of_compressor:
                setattr(self.compressor, key, value)
            elif key == "inner_lr" and self.own_rate is not None:
                self.own_rate.lr = value
            elif key == "log_level":
                self.log_level = value
                self.context.do(Configure(key, value))
