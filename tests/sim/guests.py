"""Guests of simulated runs: they are invited, come and go, and are sent away."""

from __future__ import annotations

from typing import Any

from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.client import Client
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Json

DAY_S = 86_400.0


class Guests:
    """`dlctl keys invite`, `dlctl join` and `dlctl keys revoke` at chosen times."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.asked: dict[str, Client] = {}

    def invite(self, when_s: float, name: str, lasts_s: float = DAY_S) -> None:
        world = self.simulation.world
        arguments = {
            "name": name, "serial": name.encode().hex()[:16].rjust(16, "0"),
            "expires": world.wall_s() + lasts_s,
        }  # fmt: skip
        self.asked[name] = self.simulation.request(when_s, "invite", arguments)

    def invitation(self, name: str) -> Json | None:
        """What `dlctl keys invite` would write; None: the coordinator has not answered yet."""
        reply = self.asked[name].reply
        if reply is None or not reply.done or reply.error:
            return None
        keys = self.simulation.world.keys
        row = reply.result
        return {
            **row, "secret": keys.secret(row["key"]), "coordinator": keys.public(COORDINATOR)
        }  # fmt: skip

    def join(self, when_s: float, name: str, *, twice: bool = False) -> None:
        """Run `dlctl join`, unless it runs already."""

        def begin() -> None:
            world, made = self.simulation.world, self.invitation(name)
            if made is None:
                world.timeline.after(0.2, begin)
            elif not world.over() and (twice or not self.living(name)):
                world.join_guest(made)

        self.simulation.at(when_s, begin)

    def living(self, name: str, role: str = "guest") -> list[Any]:
        """The processes of this guest, or of its worker."""
        made = self.invitation(name)
        slot = made["worker"].partition("-")[2] if made else "none"
        wanted = f"{role}-{slot}"
        return [p for p in self.simulation.world.processes if p.alive and p.name == wanted]

    def kill(self, when_s: float, name: str, role: str = "guest") -> None:
        """SIGKILL of `dlctl join`, with which its worker ends; or of its worker only."""
        self.simulation.at(when_s, lambda: [p.end(-9) for p in self.living(name, role)])

    def vanish(self, when_s: float, name: str) -> None:
        """Its machine is switched off."""

        def switch_off() -> None:
            for role in ("guest", "worker"):
                for process in self.living(name, role):
                    process.end(-9)

        self.simulation.at(when_s, switch_off)

    def freeze(self, when_s: float, name: str, for_s: float = 7.0) -> None:
        """Its machine is suspended for longer than the run waits, and wakes up."""

        def suspend() -> None:
            frozen = [p for role in ("guest", "worker") for p in self.living(name, role)]
            for process in frozen:
                process.freeze()
                self.simulation.world.timeline.after(for_s, process.thaw)

        self.simulation.at(when_s, suspend)

    def stop(self, when_s: float, name: str) -> None:
        """Ctrl-C."""
        self.simulation.at(when_s, lambda: [p.signal(15) for p in self.living(name)])

    def revoke(self, when_s: float, name: str) -> Client:
        return self.simulation.request(when_s, "revoke", {"name": name})
