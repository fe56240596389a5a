"""An agent: starts the daemons of its host and reports their exits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from daemons import process, signals
from daemons.agent.children import Children
from daemons.agent.supervision import Supervision
from daemons.agent.template import Template
from daemons.files.file_sender import ON_HOSTS, FileSender
from daemons.loop import Loop
from daemons.node.end import purge_files
from daemons.time_records import path_of
from dlctl.roles.agent.agent import Agent
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.runs import paths


def serve(templates: Sequence[Template], context: process.DaemonContext) -> int:
    loop = Loop(context.log_handler.rotate_if_full, secret=context.credentials.secret)
    children = Children(context, loop, templates=templates)
    FileSender(loop, context.directory, context.registration.name, ON_HOSTS)
    signals.stop_the_run(loop, context)
    loop.transport.connect(COORDINATOR, context.control, context.credentials.coordinator)
    machine = Agent(context.registration, context.job.timeouts.resend_s, children.adopt())
    loop.record_times(path_of(context.directory, context.registration))
    if not context.is_home:
        code = loop.run(machine)
        if machine.is_over:
            # No other process would remove the files here. Unless the next agent is being started.
            with suppress(BlockingIOError), paths.held(context.directory):
                purge_files(context.directory)
        return code
    still_s = paths.STILL_LIMITS * context.job.timeouts.silent_s
    supervision = Supervision(context.directory, loop, still_s, context.job.servers)
    supervision.begin()
    loop.chores.append(supervision.look)
    code = loop.run(machine)
    supervision.close()
    return code
