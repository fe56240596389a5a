"""An agent: starts the daemons of its host and sees them end."""

from __future__ import annotations

from daemons import process, signals
from daemons.agent.children import Children
from daemons.agent.supervision import Supervision
from daemons.loop import Loop
from dlctl import runs
from dlctl.roles.agent import Agent
from dlctl.roles.desk import COORDINATOR
from dlctl.roles.effects import SignalProcess, StartProcess


def serve(context: process.Context) -> int:
    loop = Loop(context.log_handler.rotate_if_full)
    children = Children(context, loop)
    loop.chores.append(children.look)
    loop.perform(StartProcess, children.start)
    loop.perform(SignalProcess, children.signal)
    signals.stop_the_run(loop, context.directory)
    loop.transport.connect(COORDINATOR, context.control)
    machine = Agent(context.birth, context.job.timeouts.resend_s, children.adopt())
    still_s = runs.STILL_LIMITS * context.job.timeouts.silent_s
    supervision = Supervision(context.directory, loop, still_s, context.job.servers)
    supervision.begin()
    loop.chores.append(supervision.look)
    code = loop.run(machine)
    supervision.close()
    return code


process.main("agent", serve)
