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
        self.limiters = send_queue.limiters
        self.log_level = "info"
        self._places: dict[str, tuple[object, str]] = {
            "push_window": (send_queue, "push_window_bytes"),
            "log_level": (self, "log_level"),
            **{key: (compressor, key) for key in getattr(compressor, "live", ())},
            **{key: (options, key) for key in live},
        }
        """Key -> the object that has it, and its attribute there; all but the limits."""
        if own_rate is not None:
            self._places["inner_lr"] = (own_rate, "lr")

    def values(self) -> Json:
        """All effective live settings."""
        limits = {direction: limiter.bytes_per_s for direction, limiter in self.limiters.items()}
        return limits | {key: getattr(*place) for key, place in self._places.items()}

    def apply(self, settings: Json, now: float) -> None:
        """Apply these; a key that this worker does not have is ignored."""
        for key, value in settings.items():
            if key in self.limiters:
                self.limiters[key].change(value, now)
            elif key in self._places:
                setattr(*self._places[key], value)
            if key == "log_level":
                self.context.do(Configure(key, value))
