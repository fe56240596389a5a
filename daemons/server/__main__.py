"""A server: everything that a shard is made of, in order."""

from __future__ import annotations

import os

from daemons import orphans, process, signals
from daemons.files import Files
from daemons.loop import Loop
from daemons.server import failpoint, keeping
from daemons.server.watching import Watch
from daemons.transport import address_for
from dlctl import registry
from dlctl.roles.desk import COORDINATOR
from dlctl.roles.effects import LoadArrays, SaveArrays
from dlctl.roles.server import Server


def serve(context: process.Context) -> int:
    job, birth = context.job, context.birth
    loop = Loop(context.log_handler.rotate_if_full)
    files = Files(loop, birth.name)
    loop.perform(SaveArrays, files.save)
    loop.perform(LoadArrays, files.load)
    signals.stop_the_run(loop, context.directory)
    loop.chores.append(orphans.watch_parents(loop, context.directory))
    index = int(birth.name.rpartition("-")[2])
    port = job.network.port + 1 + index if job.network.port else 0
    address = address_for(birth.run_id, birth.name, job.network.transport, port)
    address = loop.transport.listen(address)
    loop.transport.connect(COORDINATOR, context.control)
    point = failpoint.from_environment(os.environ)
    storages = keeping.storages(context.directory, job.servers, point)
    loop.chores.append(Watch(storages, context.directory))
    machine = Server(
        birth,
        job,
        context.key,
        address,
        registry.load("algorithms", job.algorithm.name),
        registry.load("optimizers", job.optimizer.name),
        registry.load("compressors", job.compression.name),
        storages,
    )
    return loop.run(machine)


process.main("server", serve)
