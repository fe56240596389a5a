"""The live settings of a daemon, and the object that has each of them."""

from __future__ import annotations

from collections.abc import Mapping

from dlctl.roles.protocol.context import COORDINATOR, Context
from dlctl.wire.machine import Configure
from dlctl.wire.messages import Changed, ChangeSettings, Json

Place = tuple[object, str]
"""An object, and the attribute that is the setting."""


class LiveValues:
    def __init__(self, context: Context, name: str, places: Mapping[str, Place]) -> None:
        """name: of the daemon. places: key -> where it is; all but the level of the log."""
        self.context = context
        self.name = name
        self.log_level = "info"
        self._places = {**places, "log_level": (self, "log_level")}
        self._set: Json = {}
        """Everything that was set so far."""

    def values(self) -> Json:
        """All effective live settings."""
        return {key: getattr(*place) for key, place in self._places.items()}

    def begin(self, settings: Json) -> None:
        """Apply the settings of a welcome; changes that have overtaken it are newer."""
        self._apply(settings | self._set)

    def move(self, key: str, place: Place) -> None:
        """From now on the value of this live setting is in `place`."""
        self._places[key] = place
        if key in self._set:
            setattr(*place, self._set[key])

    def on_change(self, message: ChangeSettings) -> None:
        """Apply it, and report old and new values of the changed keys that this daemon has."""
        before = self.values()
        self._apply(message.settings)
        was, now_is = (
            {key: values[key] for key in message.settings if key in values}
            for values in (before, self.values())
        )
        self.context.send(COORDINATOR, Changed(message.change, self.name, was, now_is))

    def _apply(self, settings: Json) -> None:
        """A key that this daemon does not have is ignored."""
        self._set = self._set | settings
        for key, value in settings.items():
            if key in self._places:
                setattr(*self._places[key], value)
            if key == "log_level":
                self.context.do(Configure(key, value))
