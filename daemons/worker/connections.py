"""The connections of a worker besides those to servers: to the other replicas, and to a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daemons.loop import Loop
from daemons.process import DaemonContext
from daemons.worker.replica_group import GroupThread
from daemons.worker.work_clock import WorkClock
from dlctl.algorithms.base import Shape
from dlctl.launch import addresses
from dlctl.roles.protocol.effects import JoinGroup, LeaveGroup, OpenStore, Reduce


def open_to_replicas(
    loop: Loop,
    context: DaemonContext,
    shape: Shape,
    device: Callable[[], Any],
    clock: WorkClock,
) -> tuple[str, GroupThread | None]:
    """(address at which this replica listens for others, or ""; the thread of its group, if it has
    one). device: of the model, once it is built.
    """
    address, group = "", None
    if not {"group", "peers"} & {*shape.links}:
        return address, group
    job, me = context.job, context.registration
    reached = addresses.of_worker(me.run_id, me.name, job, context.agent, context.control)
    if "group" in shape.links:
        host = addresses.host_of(reached.bind) if job.has_other_hosts else addresses.LOOPBACK
        group = GroupThread(loop, host, device, clock)
        loop.perform(OpenStore, group.open)
        loop.perform(JoinGroup, group.join)
        loop.perform(Reduce, group.reduce, anywhere=True)
        loop.perform(LeaveGroup, group.leave)
    if "peers" in shape.links:
        address = reached.advertise(loop.transport.listen(reached.bind))
    return address, group
