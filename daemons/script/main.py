"""A worker whose job has a training loop of its own: runs the user's program in the main thread.

`dlctl.attach` makes it a worker (`daemons.attach`). Before it joins, the run knows only that the
process exists. If the program ends before that, the worker registers to say why.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial
from typing import NoReturn

from daemons import imports, parent_watch, process
from daemons.attach import context as attached
from daemons.attach.context import ProgramEnd, ScriptProcess
from daemons.loop import Loop
from daemons.script import machine, program, rank_environment, silence
from daemons.worker.at_exit import end_in_this_thread
from daemons.worker.task.print_streams import capture, end_lines
from dlctl import registry
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import BuildModel, TaskFailed
from dlctl.roles.worker.worker import Worker
from dlctl.util import cores

log = logging.getLogger("dlctl")
EXIT_S = 30.0
"""For what the program leaves to be done at its exit, such as the last upload of a logger."""


def run(context: process.DaemonContext) -> int:
    """Run the program; returns the exit code of the process."""
    me = context.registration
    capture(context.log_handler, me.name, me.incarnation)
    slot = int(me.name.rpartition("-")[2])
    workers = context.job.workers
    machine.give_share(workers, slot, cores.usable(), machine.gpus(), os.environ)
    machine.use_threads(os.environ)
    started = attached.begin(context)
    mine = os.getpid()
    rank_environment.leave(os.environ)
    imports.quicken()
    others = None
    if workers.processes > 1:
        from daemons.script.later_ranks import LaterRanks  # Loads torch.

        others = LaterRanks(workers.processes, started, partial(fail, started))
    of_script = (started, threading.main_thread(), context.job.job.search_path, silence.FIRST_S)
    threading.Thread(target=silence.watch, args=of_script, name="silence", daemon=True).start()
    end = program.run(context.job.job, context.directory if context.is_home else None)
    if os.getpid() != mine:
        _end_child(end)
    if others is None:
        return _end(started, end)
    others.own_end(end)
    code = _end(started, end)
    is_over = started.session is not None and started.session.is_over and not end.is_error
    return others.finish(code, context.job.timeouts.script_s if is_over else 0.0)


def _end(started: ScriptProcess, end: ProgramEnd) -> int:
    """The program has ended. Returns the exit code of the process."""
    if started.session is None:
        when = "without a call of dlctl.attach"
        hint = "it has to call run = dlctl.attach(model, optimizer), and train `with run:`"
    elif started.session.has_joined:
        return started.session.end(end)
    else:
        when = "before it has joined the run"
        hint = "it has to train `with run:`, on run.loader(...) or with run.step(samples=n)"
    return report(started.context, end.failure(when, end.hint or hint))


def fail(started: ScriptProcess, failed: TaskFailed) -> int:
    """The program has failed in another process of this worker. Returns the exit code."""
    session = started.session
    if session is not None and session.has_joined:
        return session.fail(failed)
    return report(started.context, failed, hears_signals=False)


def _end_child(end: ProgramEnd) -> NoReturn:
    """The program has forked, and its child has come to the end: it has no part in the run."""
    if end.is_error:
        print(end.detail or end.what, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code)


def report(
    context: process.DaemonContext, failed: TaskFailed, *, hears_signals: bool = True
) -> int:
    """Register, and fail instead of building a model, as a worker does whose task cannot be
    imported. hears_signals: in the main thread. Returns the exit code.
    """
    job = context.job
    loop = Loop(context.log_handler.rotate_if_full, secret=context.credentials.secret)
    loop.perform(BuildModel, lambda _: loop.post(failed))
    if hears_signals:
        loop.stop_on_signals()
    loop.chores.append(parent_watch.watch_parents(loop, context))
    loop.transport.connect(COORDINATOR, context.control, context.credentials.coordinator)
    method = registry.load("algorithms", job.algorithm.name)
    compressor = registry.load("compressors", job.compression.name)
    options = compressor.Options(**job.compression.options)
    return loop.run(Worker(context.registration, job, method, compressor(options)))


def end(code: int) -> None:
    """Do what Python does at exit, for at most `EXIT_S`."""

    def give_up() -> None:
        log.warning("what the script does at its exit took more than %g s: abandoned", EXIT_S)
        end_lines()
        logging.shutdown()
        os._exit(code)

    timer = threading.Timer(EXIT_S, give_up)
    timer.daemon = True
    timer.start()
    end_in_this_thread()
    end_lines()
