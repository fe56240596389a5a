"""`python -P -m daemons.template RUN_DIRECTORY AGENT PACKAGE PADDING`, with the socket of its agent
as standard input: imports what the daemons of this package import, and then forks one of them for
each request.

A fork copies memory but no threads, and no GPU context survives it. So the template never computes:
it only imports, and refuses to fork if a library has started more than that.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from collections.abc import Sequence

from daemons.imports import without_collections
from daemons.parent_death import end_with
from daemons.template import running
from daemons.template.command_line import rewrite
from daemons.template.forked import become
from daemons.template.words import MESSAGE_BYTES_MAX, READY, read_request

IMPORTED = {
    "server": ("daemons.server.serving",),
    "worker": ("daemons.worker.main", "torch.optim"),
    "script": ("daemons.script.main", "daemons.attach.begin", "torch.optim", "torch._dynamo"),
}
"""By package of daemons. torch._dynamo: the first optimiser of a script imports it, which takes
half as long as torch itself; those of workers do without it."""
BLAS = "numpy"
"""Its library for linear algebra has threads from the import on, and ends them before a fork."""


def main() -> None:
    agent = socket.socket(fileno=os.dup(0))
    if not end_with(os.getppid()):
        sys.exit(1)
    if not rewrite(sys.orig_argv[:-1]):
        cannot = "its command line cannot be changed here"
    else:
        cannot = prepare(IMPORTED[sys.argv[3]])
    agent.send(cannot.encode() or READY)
    if not cannot:
        serve(agent)


def prepare(modules: Sequence[str]) -> str:
    """Import these. Returns why this process must not fork; "" if it may."""
    if running.threads() > 1:
        return "a thread runs since Python started, as of a sitecustomize"
    try:
        with without_collections():
            importlib.import_module(BLAS)
            threads = running.threads()
            for name in modules:
                importlib.import_module(name)
    except Exception as error:  # The daemon itself says what is wrong, and where.
        return f"an import fails: {type(error).__name__}: {error}"
    gc.freeze()  # A collection in a daemon would write to, and so copy, what it shares with others.
    if running.threads() > threads:
        return "an import has started a thread"
    if running.uses_gpu():
        return "an import has opened a GPU"
    return ""


def serve(agent: socket.socket) -> None:
    """Fork a daemon for each request, until the agent is gone."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(agent, MESSAGE_BYTES_MAX, 2)
        if not data:
            return
        try:
            _fork(data, descriptors)
        except OSError as error:  # No memory, no pid: the agent sees the daemon's line break off.
            print(f"the template cannot fork: {error}", file=sys.stderr, flush=True)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(data: bytes, descriptors: list[int]) -> None:
    """Fork a process that forks the daemon and exits: see `words`."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    status = 1
    try:
        if not os.fork():
            become(read_request(data), *descriptors)
        status = 0
    finally:  # No copy of this process may return from here, and serve as well.
        os._exit(status)


if __name__ == "__main__":
    main()
