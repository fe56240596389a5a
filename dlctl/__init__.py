"""dlctl: train torch models with the distributed optimisation methods of the literature.

Read the code in this order; it is the way of one gradient:

 1. `daemons/worker/replica.py`             the task's loss and its gradient, a flat float32 vector
 2. `dlctl/flat.py`                         which parameter lies where, which shard owns which slice
 3. `dlctl/algorithms/downpour.py`          Replica: accrue, local step, when to push and to fetch
 4. `dlctl/roles/worker/training.py`        serves what the method asks for: data, gradient, push
 5. `dlctl/compress/topk.py`                adds the residual, takes the largest entries
 6. `dlctl/roles/worker/shard_client.py`    sequence numbers, a window of unacknowledged pushes
 7. `dlctl/messages/data.py`, `dlctl/wire.py`   Push, as a msgpack header and raw buffers
 8. `daemons/transport/sockets.py`          ZeroMQ
 9. `dlctl/roles/server/shard_protocol.py`  who, which epoch, which number
10. `dlctl/roles/server/dedup.py`           each number is applied exactly once
11. `dlctl/algorithms/downpour.py`          Server: what a push means to this method
12. `dlctl/shards/mapped.py`                the shard's blocks, on their way into the next commit
13. `dlctl/optim/adagrad.py`                the rule, block by block; then commit and ack

`tests/test_tour.py` walks this way in one straight function. Who may import whom:

    daemons > cli > launch | sim | control | jobfile | health
            > roles (coordinator | server | worker | agent > protocol) > algorithms > runs
            > shards > optim > compress > wire > machine > messages | flat > config > util > errors

`dlctl/roles/coordinator/coordinator.py` is the control plane (membership, leases, settings,
checkpoints), and `dlctl/machine.py` the contract that all four roles keep. Everything under
`dlctl/` but `cli/`, `launch/`, `control/` and `runs/` is pure: sockets, clocks, threads and torch
live in `daemons/`, and `dlctl/sim/` runs the same roles in virtual time.
"""

__version__ = "0.1.0"
