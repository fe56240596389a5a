"""The machines and the network of a simulated run."""

from __future__ import annotations

from dlctl.job.config import JobFile
from dlctl.records.work_times import LoopTimes
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.sim.handling import Handling, HandlingCosts
from dlctl.sim.network import NetworkOptions, SimLink
from dlctl.sim.process import Process
from dlctl.sim.request import SimulationRequest
from dlctl.util.names import HOME_AGENT


def handling_of(request: SimulationRequest, job: JobFile, scale: float = 1.0) -> Handling:
    """With a link each daemon has a machine of its own, but for the coordinator and its agent.
    scale: of the sizes of arrays.
    """
    recorded = {role: LoopTimes.of_json(row) for role, row in request.loops.items()}

    def machine_of(process: Process) -> str:
        if request.link is None:
            return process.agent if job.hosts else ""
        return COORDINATOR if process.name == HOME_AGENT else process.name

    costs = HandlingCosts(recorded, scale)
    return Handling(costs, request.cores, machine_of, request.wake_s)


def network_of(request: SimulationRequest, scale: float | None = None) -> NetworkOptions:
    """scale: of the sizes of arrays, in messages that are not encoded; None: they are."""
    if request.link is None:
        link = SimLink(latency_s=request.latency_s)
        return NetworkOptions(link=link, payload_scale=scale)
    return NetworkOptions(
        link=SimLink(latency_s=request.link.latency_s),
        card_bytes_per_s=request.link.bytes_per_s,
        payload_scale=scale,
        cards_are_fair=scale is None,
        machines={HOME_AGENT: COORDINATOR},
    )
