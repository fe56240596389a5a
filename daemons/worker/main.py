"""A worker: the only daemon that runs user code, in its main thread."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import sys
import threading
import traceback
from functools import partial

from daemons import parent_watch, process
from daemons.files.arrays import serve_files
from daemons.loop import Loop, Signals
from daemons.time_records import path_of
from daemons.worker.ack_record import Acks
from daemons.worker.at_exit import end_user_code
from daemons.worker.compute_thread import ComputeThread
from daemons.worker.connections import open_to_replicas
from daemons.worker.ranks.rank_processes import Ranks
from daemons.worker.task.failures import ProcessLost
from daemons.worker.task.print_streams import capture, end_lines
from dlctl import registry
from dlctl.compress import values
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import (
    Settled,
)
from dlctl.roles.worker.worker import Worker

log = logging.getLogger("dlctl")


class Main:
    """The main thread: it receives signals, and computes as soon as there is work."""

    def __init__(self) -> None:
        self.signals = Signals()
        self.begin: queue.SimpleQueue[ComputeThread] = queue.SimpleQueue()
        self.computes: ComputeThread | None = None

    def run(self) -> None:
        """Compute. A second thread runs everything else, and exits the process."""
        threading.Thread(target=self._messages, name="messages", daemon=True).start()
        self.computes = self.begin.get()
        self.computes.run()

    def end(self, _: int) -> None:
        """End the task's code, if it was ever loaded, and the lines that it has begun to print."""
        if self.computes is not None:
            end_user_code(self.computes.finish)
        end_lines()

    def _messages(self) -> None:
        try:
            process.main("worker", partial(serve, self), self.end)
        except SystemExit as end:
            print(end, file=sys.stderr)
        except BaseException:  # before there is a log
            traceback.print_exc()
        os._exit(1)


def serve(main: Main, context: process.DaemonContext) -> int:
    job, registration = context.job, context.registration
    capture(context.log_handler, registration.name, registration.incarnation)
    loop = Loop(context.log_handler.rotate_if_full, secret=context.credentials.secret)
    serve_files(loop, context.directory, registration)
    acks = Acks(context.directory, registration.name, registration.incarnation, job.servers.count)
    method = registry.load("algorithms", job.algorithm.name)
    ranks = _later_ranks(context, loop)
    run = context.directory if context.is_home else None  # Other hosts have unchanging copies.
    thread = ComputeThread(
        loop, job, (context.directory, registration), method.shape, ranks, run,
    )  # fmt: skip
    main.begin.put(thread)
    loop.perform(Settled, acks.write)
    loop.stop_on_signals(main.signals)
    loop.chores += [parent_watch.watch_parents(loop, context), values.MEMORY.check]
    loop.record_times(path_of(context.directory, registration), thread.clock.times)
    address, group = open_to_replicas(loop, context, method.shape, thread.device, thread.clock)
    if group is not None:
        thread.sum_by(group.begin_sum)
    loop.transport.connect(COORDINATOR, context.control, context.credentials.coordinator)
    compressor = registry.load("compressors", job.compression.name)
    machine = Worker(
        context.registration,
        job,
        method,
        compressor(compressor.Options(**job.compression.options)),
        address,
    )
    try:
        code = loop.run(machine)
    except ProcessLost as error:
        log.error("%s", error.message, extra={"detail": error.detail})
        code = error.exit_code
    if ranks is not None:
        ranks.end()
    for loader in multiprocessing.active_children():
        loader.kill()  # On their own they would notice the worker's exit seconds later.
    return code


def _later_ranks(context: process.DaemonContext, loop: Loop) -> Ranks | None:
    """The other processes of this replica; None: it has only one."""
    job, registration = context.job, context.registration
    if job.ranks == 1:
        return None
    if job.replica.ranks > 1:
        loop.transport.bulk.spare_memory()
    return Ranks(
        job.ranks,
        loop.fail,
        loop.post,
        argv=(str(context.directory), registration.name, str(registration.incarnation)),
        ready_s=job.timeouts.ready_s,
        silent_s=job.timeouts.silent_s,
    )
