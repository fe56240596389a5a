"""dlctl: train torch models with the distributed optimisation methods of the literature.

Read the code in this order; it is the path of one gradient:

 1. `daemons/worker/compute_thread.py`, `daemons/worker/replica.py`   the loss and its gradient
 2. `dlctl/roles/worker/worker.py`          the machine that receives it, as an event
 3. `dlctl/roles/worker/training.py`        drives the method; its needs are served by `services/`
 4. `dlctl/algorithms/methods/downpour.py`   Replica: accrue, local step, when to push, to read
 5. `dlctl/compress/topk.py`                adds the residual, takes the largest entries
 6. `dlctl/roles/worker/shard_client.py`    sequence numbers, a window of unacknowledged pushes
 7. `dlctl/wire/messages/data.py`, `dlctl/wire/codec.py`   Push, as a msgpack header and raw buffers
 8. `daemons/transport/sockets.py`          ZeroMQ
 9. `dlctl/roles/server/server.py`, `dlctl/roles/server/shard_protocol.py`   the sender's term
10. `dlctl/roles/server/table_shard.py`, `dlctl/roles/server/dedup.py`   each number once
11. `dlctl/algorithms/methods/downpour.py`   Server: how this method handles a push
12. `dlctl/shards/base.py`                  the shard: its vectors, version and history
13. `dlctl/optim/adagrad.py`                the rule, block by block
14. `dlctl/shards/mapped.py`                the commit; then the ack is sent

`tests/test_tour.py` follows this path in one straight function. The rooms, from the top; a module
may import those below its own:

    daemons/     sockets, clocks, threads, files, torch: one folder for each kind of process
    cli/ ops/    commands; what they do
    jobfile/     a job file is read and checked
    launch/ control/ health/ observe/ sim/   starting agents, asking a run, checks of hosts,
                 figures of a run, the simulator
    roles/       state machines: coordinator, server, worker, agent; `protocol/` is what they share
    stores/      checkpoints, weights and data at addresses, as s3://
    runs/        a run directory: database, logs, checkpoints
    algorithms/  what a method is made of; `methods/` has them, one file each
    records/     what a run puts on record, as values
    shards/ optim/ compress/   a slice of a table, the rules of servers, compressors
    model/ wire/ job/          tensors as vectors; messages and the contract of a state machine;
                 what a job is

Everything under `dlctl/` but `cli/`, `ops/`, `launch/`, `control/`, `observe/`, `stores/` and
`runs/` is pure: sockets, clocks, threads and torch are in `daemons/`, and `dlctl/sim/` runs the
same roles in virtual time. All four roles implement one contract, `dlctl/wire/machine.py`. The
control plane is `dlctl/roles/coordinator/`:

    coordinator.py       events in, effects out
    membership.py        daemons, their states and terms        failure_detector.py   dead daemons
    supply.py            the dataset, as workers have built it  leases.py             who has what
    data_pool.py         portions of it, of any kind            run_progress.py       how far it is
    lead.py              the lead of the method                 driven.py             its batches
    checkpointing.py     when to save, and which daemons        settings.py           `dlctl set`
    persistence.py       state for the next coordinator         shutdown.py           end of a run

A term is the fencing token of one process of a worker slot or of a shard: older ones are refused.
An epoch is one pass over the dataset. A portion is a range of the data, a shard a range of the
parameters on a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if not TYPE_CHECKING:

    def __getattr__(name):
        # What trains is loaded when it is first used: `import dlctl` loads neither torch nor zmq.
        places = dict.fromkeys(("attach", "Left"), "daemons.attach.begin")
        if place := (places | {"fetched": "dlctl.stores.fetching"}).get(name):
            from importlib import import_module

            return getattr(import_module(place), name)
        from dlctl.outdated import names_of

        return names_of(__name__)(name)
