"""A server: the process of one shard."""

from __future__ import annotations

import logging
import os

from daemons import parent_watch, process, signals
from daemons.files.arrays import serve_files
from daemons.loop import Loop
from daemons.server import failpoint
from daemons.server.committing import Committing
from daemons.server.storages import choose_storages
from daemons.server.watching import Watch
from daemons.time_records import path_of
from dlctl import kernels, registry
from dlctl.launch import addresses
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.server.server import Server
from dlctl.wire.messages import Push

log = logging.getLogger("dlctl")


def serve(context: process.DaemonContext) -> int:
    job, registration = context.job, context.registration
    loop = Loop(context.log_handler.rotate_if_full, secret=context.credentials.secret)
    serve_files(loop, context.directory, registration)
    signals.stop_the_run(loop, context)
    loop.chores.append(parent_watch.watch_parents(loop, context))
    place = addresses.of_server(
        registration.run_id, registration.name, job, context.agent, context.control
    )
    address = place.advertise(loop.transport.listen(place.bind))
    loop.transport.connect(COORDINATOR, context.control, context.credentials.coordinator)
    point = failpoint.from_environment(os.environ)
    if why := kernels.missing():
        log.info("numpy computes updates, C would be faster: %s", why)
    storages = choose_storages(context.directory, job.servers, point)
    loop.chores.append(Watch(storages, context.directory, Committing(loop).await_all))
    loop.transport.early = Push
    machine = Server(
        registration,
        job,
        address,
        registry.load("algorithms", job.algorithm.name),
        registry.load("optimizers", job.optimizer.name),
        registry.load("compressors", job.compression.name),
        storages,
    )
    loop.record_times(path_of(context.directory, registration))
    return loop.run(machine)
