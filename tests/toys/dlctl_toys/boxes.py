"""A launcher whose hosts are boxes: directories of this machine. A wrapper command starts whatever
runs in a box, as that of a container would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from dlctl.job.config import Allocated, Host
from dlctl.launch.addresses import LOOPBACK
from dlctl.launch.calls import node_words
from dlctl.launch.reached import Reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    boxes: Annotated[int, Ge(1), Le(8)]
    """Boxes, each with an agent."""
    directory: str
    """Where they are: a full path."""
    wrapper: tuple[str, ...] = ("env",)
    """The command that runs another one in a box."""


class Boxes(Reached):
    Options = Options
    title = "boxes"
    noun = "box"
    takes_hosts = False
    is_reclaimed = False

    def places(self) -> tuple[Allocated, ...]:
        names = [f"box-{n}" for n in range(1, self.options.boxes + 1)]
        return tuple(Allocated(name=n, dir=f"{self.options.directory}/{n}") for n in names)

    def check(self) -> Iterator[tuple[str, str, str]]:
        if not self.options.directory.startswith("/"):
            yield "directory", "must be a full path", ""

    def an_address(self, hosts: Sequence[Host]) -> str:
        return LOOPBACK

    def command(self, host: Host, *, is_shared: bool) -> list[str]:
        return [*self.options.wrapper, f"DLCTL_HOST={host.name}", *node_words(host)]


class Tied(Boxes):
    """The same, declared as one whose processes end with the coordinator."""

    outlives = False
