"""dlctl: train torch models with the distributed optimisation methods of the literature.

Read the code in this order; it is the way of one gradient:

 1. `daemons/worker/compute.py`, `daemons/worker/replica.py`   the task's loss and its gradient
 2. `dlctl/roles/worker/worker.py`          the machine that it comes to, as an event
 3. `dlctl/roles/worker/training.py`        drives the method; its needs are served by `services/`
 4. `dlctl/algorithms/downpour.py`          Replica: accrue, local step, when to push and to read
 5. `dlctl/compress/topk.py`                adds the residual, takes the largest entries
 6. `dlctl/roles/worker/shard_client.py`    sequence numbers, a window of unacknowledged pushes
 7. `dlctl/messages/data.py`, `dlctl/wire.py`   Push, as a msgpack header and raw buffers
 8. `daemons/transport/sockets.py`          ZeroMQ
 9. `dlctl/roles/server/server.py`, `dlctl/roles/server/shard_protocol.py`   whose push it is
10. `dlctl/roles/server/table_shard.py`, `dlctl/roles/server/dedup.py`   each number once
11. `dlctl/algorithms/downpour.py`          Server: what a push means to this method
12. `dlctl/shards/base.py`                  the shard: its vectors, version and history
13. `dlctl/optim/adagrad.py`                the rule, block by block
14. `dlctl/shards/mapped.py`                the commit; then the ack goes out

`tests/test_tour.py` walks this way in one straight function. Who may import whom:

    daemons > cli > ops > launch | sim | control | jobfile | health | observe
            > roles (coordinator | server | worker | agent > protocol) > algorithms > runs
            > shards > optim > compress > wire > machine > messages | flat > config > util > errors

Everything under `dlctl/` but `cli/`, `ops/`, `launch/`, `control/`, `observe/` and `runs/` is pure:
sockets, clocks, threads and torch live in `daemons/`, and `dlctl/sim/` runs the same roles in
virtual time. All four roles keep one contract, `dlctl/machine.py`. The control plane is
`dlctl/roles/coordinator/`:

    coordinator.py       an event comes in, what follows from it goes out
    membership.py        daemons, their states and epochs       failure_detector.py   who is dead
    lease_scheduler.py   which worker leases which portion      portions.py           the portions
    checkpointing.py     when, and who saves                    settings.py           `dlctl set`
    persistence.py       what the next coordinator has to know  shutdown.py           how a run ends

An epoch is one process of a worker slot, by which older ones are fenced; a data epoch is one pass
over the dataset. A portion is a range of the data, a shard a range of the parameters on a server.
"""

__version__ = "0.1.0"
