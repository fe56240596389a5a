"""dlctl: train torch models with the distributed optimisation methods of the literature.

Read the code in this order; it is the way of one gradient:

 1. `daemons/worker/replica.py`   the task's loss and its gradient, as one flat float32 vector
 2. `dlctl/flat.py`               which parameter lies where in it, and which shard owns which slice
 3. `dlctl/algorithms/downpour.py`  Replica: accrue, local step, when to push and when to fetch
 4. `dlctl/roles/training.py`     what the method asks for: lease data, compute, push, fetch
 5. `dlctl/compress/topk.py`      the residual is added, the largest entries are taken
 6. `dlctl/roles/channel.py`      a sequence number, a window of unacknowledged pushes, resending
 7. `dlctl/messages/data.py`, `dlctl/wire.py`   Push, as a msgpack header and raw buffers
 8. `daemons/transport.py`        ZeroMQ
 9. `dlctl/roles/serving.py`      who, epoch, sequence number: applied exactly once
10. `dlctl/algorithms/downpour.py`  Server: what a push means to this method
11. `dlctl/shards/mapped.py`      the shard's blocks, on their way into the next commit
12. `dlctl/optim/adagrad.py`      the rule, block by block; commit, ack, and the next fetch back up

`tests/test_tour.py` walks this way in one straight function. Who may import whom:

    daemons > cli > launch | sim | health > roles > algorithms > shards > optim > compress
            > wire > messages | machine | flat > config > errors

`dlctl/roles/coordinator.py` is the control plane (membership, leases, settings, checkpoints), and
`dlctl/machine.py` the contract that all four roles keep. Everything under `dlctl/` that is not
`cli/` and not about files (`rundb`, `runs`, `checkpoints`, `states`, `client`) is pure: sockets,
clocks, threads and torch live in `daemons/`, and `dlctl/sim/` runs the same roles in virtual time.
"""

__version__ = "0.1.0"
