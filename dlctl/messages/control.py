"""The control plane: coordinator, agents, daemons and the command line."""

from __future__ import annotations

from dataclasses import field

from dlctl.messages.base import Array, Json, Message, Signed
from dlctl.util.record import record

# ------------------------------------------------------------ control plane: joining and leaving


@record
class Register(Message):
    """A daemon is there. Repeated until `Welcome` comes, so it must be idempotent."""

    run_id: str
    role: str
    name: str
    incarnation: int
    pid: int
    host: str
    version: str


@record
class Welcome(Message):
    """To a worker: its slot and epoch. To a server: its shard and generation."""

    name: str
    index: int
    term: int
    """Epoch of the slot, or generation of the shard."""
    token: bytes
    """To a worker: the proof of its epoch. To a server: the key by which it checks those."""
    settings: Json
    """To begin with."""
    finds: bool = False
    """To a worker: find the batch size that there is memory for."""


@record
class Dismiss(Message):
    """You are not part of this run (any more): exit."""

    reason: str


@record
class ModelReady(Message):
    """A worker has built the task's model and dataset."""

    name: str
    layout: bytes
    samples: int
    """Of a data epoch."""
    has_finish: bool = False
    """Whether the task has a `finish`."""
    frozen: bytes = b""
    """Digests of its frozen parameters (`dlctl/frozen.py`)."""
    lacks_weights: bool = False
    """The job's initial values are not on its host: what it has built is not what the run has."""
    order: str = ""
    """Digest of the order of the samples that the task has chosen; "": it has chosen none."""
    batch_size: int = 0
    """That there is memory for; 0: it was not told to find it."""
    shards: int = 0
    """Of a dataset that is a stream, which has no number of samples; 0: it is none."""
    clients: tuple[int, ...] = ()
    """The samples of each client, if it is cut into clients."""


@record
class Assign(Message):
    """To a server: own the elements [lo, hi) of the flat vector."""

    lo: int
    hi: int
    layout: bytes
    restore: str
    """Directory of a checkpoint, or ""."""
    keep: bool = False
    """Another server of this shard has said `Serving`: go on from the state that it has kept, or
    fail. False: begin anew, whatever is there; `restore` counts only then."""
    samples: int = 0
    """Of the dataset: a schedule goes by the length of the run."""


@record
class Serving(Message):
    """Answer to `Assign`: the server owns its shard and listens at `address`."""

    name: str
    address: str
    initialised: bool


@record
class Topology(Message):
    """To a worker: all servers in shard order. One worker is told to initialise empty shards."""

    addresses: tuple[str, ...]
    keys: tuple[str, ...]
    """Their public keys; "" for connections without."""
    initialise: bool
    restore: str
    under_way: bool = False
    """All workers have been at work: whoever comes now joins a run that trains."""
    frozen: bytes = b""
    """Digests of the run's frozen parameters: a worker that has others loads those."""
    batch_size: int = 0
    """Samples of one batch of this worker; 0: as the job file says for all."""


@record
class Moved(Message):
    """To a worker: a new process owns this shard. Repeated until `Noted`."""

    shard: int
    number: int
    """Its generation."""
    address: str
    key: str


@record
class Noted(Message):
    """From a daemon: it has what the coordinator told it under this number."""

    name: str
    what: str
    """"guests", "peers", or "moved" and the number of a shard."""
    number: int


@record
class Members(Message):
    """To a server: the slots that take part now. Barriers count these."""

    slots: tuple[int, ...]
    scale: tuple[float, ...] = ()
    """`schedule.Scale`, if the rate goes with the number of workers that the run is to have."""


@record
class Guests(Message):
    """To a server: who may connect. Repeated until `Noted`; the newest `number` counts."""

    number: int
    names: bytes
    """JSON: public key -> name. There may be more of them than a header holds."""


@record
class Report(Message):
    """About once a second, and whenever the phase changes; also a daemon's heartbeat."""

    name: str
    incarnation: int
    phase: str
    waiting_for: str
    """Names of the daemons it waits for, or ""."""
    metrics: Json


@record
class Heard(Message):
    """For each report, and if a daemon registers again: the coordinator is there."""


@record
class Failed(Message):
    """The user's code, or this daemon, cannot go on. `detail` is the traceback."""

    name: str
    error: str
    detail: str
    fatal: bool
    """True: a restart would end the same way."""


# ------------------------------------------------------------ control plane: data


@record
class LeaseRequest(Message):
    """Give me a portion. Repeated with the same `request` until an answer comes."""

    slot: int
    epoch: int
    request: int
    ahead: bool
    """There is still work: one more only if the others are not left without."""
    ends: tuple[int, ...] = ()
    """What this worker has found: data epoch, shard of the stream, and the samples that it has."""


@record
class Lease(Message):
    """Samples [start, stop) in the shuffled order of `data_epoch`, or of a shard of a stream, which
    may end before, or of a client. start == stop: none now, ask later.
    """

    request: int
    portion: int
    data_epoch: int
    start: int
    stop: int
    samples: int = 0
    """Of all workers, that are done."""
    shard: Signed = -1
    """Of the stream, or the client; -1: the dataset has no such."""


@record
class PortionDone(Message):
    """All gradients of a portion are in acknowledged pushes. `loss_sum` is over its samples; it is
    infinite if the last of these pushes was refused, or empty because the steps were infinite.
    """

    slot: int
    epoch: int
    data_epoch: int
    portion: int
    steps: int
    samples: int
    loss_sum: float
    metric_sums: Json = field(default_factory=dict)
    """What else the task's loss returns: name -> [sum over samples, samples that have it]."""
    end: Signed = -1
    """The samples of the stream's shard, if it has ended in this portion; else -1."""


@record
class PortionNoted(Message):
    """The coordinator has recorded that a portion is done."""

    data_epoch: int
    portion: int


# ------------------------------------------------------------ control plane: changes and ends


@record
class Change(Message):
    """Put these settings in force. Repeated until `Changed`; applying twice does no harm."""

    change: int
    settings: Json


@record
class Changed(Message):
    change: int
    name: str
    before: Json
    after: Json


@record
class Save(Message):
    """Write your state into the checkpoint directory. Repeated until `Saved`."""

    checkpoint: int
    directory: str
    is_last: bool = False
    """To a server: the run ends with this, so apply nothing more. It would be acknowledged, and in
    no checkpoint."""


@record
class Saved(Message):
    """`file` is relative to the checkpoint directory; `state` goes into the manifest."""

    checkpoint: int
    name: str
    file: str
    sha256: str
    nbytes: int
    state: Json
    error: str


@record
class Evaluate(Message):
    """To a worker: fetch the servers' parameters and run the task's `evaluate` on them."""

    evaluation: int
    finishes: bool = False
    """It is the task's `finish` that is to be run, with `metrics`."""
    metrics: Json = field(default_factory=dict)
    average: bool = False
    """On the moving average of the parameters."""


@record
class Evaluated(Message):
    evaluation: int
    name: str
    metrics: Json
    error: str
    text: str = ""
    """What `finish` has printed and returned."""


@record
class Drain(Message):
    """To a worker: finish the step, push what is accrued, wait for the acks, then say `Drained`."""

    reason: str


@record
class Drained(Message):
    name: str


@record
class Shutdown(Message):
    """Exit now, in order. The last message a daemon gets."""

    reason: str
    keep_state: bool = False
    """To a server: leave its shard's state behind, the run may be recovered from it."""


# ------------------------------------------------------------ control plane: processes of a host


@record
class Spawn(Message):
    """To an agent: run this incarnation of a daemon. Repeated until it reports; idempotent."""

    name: str
    role: str
    incarnation: int
    secret: str
    """Its secret key; "" for connections without."""


@record
class Spawned(Message):
    """From an agent: the incarnation has this pid. Answers `Spawn`."""

    name: str
    incarnation: int
    pid: int


@record
class Kill(Message):
    """To an agent: end this incarnation; `signal` is 15 or 9."""

    name: str
    incarnation: int
    signal: int


@record
class ProcessExited(Message):
    """From an agent, until noted. `status` is negative for a process that a signal killed."""

    name: str
    incarnation: int
    status: Signed
    last_lines: tuple[str, ...]
    cause: str
    """Why a signal killed it, if the host knows: "out of memory: limit 64 MiB"; else ""."""


@record
class ExitNoted(Message):
    name: str
    incarnation: int


# ------------------------------------------------------------ control plane: the command line


@record
class Request(Message):
    """From a client: `verb` with its arguments. `request` is the client's own random number."""

    request: int
    verb: str
    arguments: Json


@record
class Reply(Message):
    """`done` is False while the work goes on: `result` then says how far it is."""

    request: int
    done: bool
    error: str
    result: Json


# ------------------------------------------------------------ control plane: answers


@record
class RegisterAgain(Message):
    """To an agent that reports: this coordinator has no note of its having registered."""


@record
class Reopen(Message):
    """To a server: the run goes on, checkpoint `last` has not been its last one. Only a server that
    says so in its reports is told.
    """

    last: int


# ------------------------------------------------------------ control plane: replicas


@record
class Peers(Message):
    """To a worker: who takes part now, and who is about to. Repeated until `Noted`; the newest
    `number` counts.
    """

    number: int
    slots: tuple[int, ...]
    joining: tuple[int, ...]
    """Of these slots, those that do not take part yet: they may ask, and cannot answer."""
    epochs: tuple[int, ...]
    addresses: tuple[str, ...]
    """"" while a worker does not listen."""
    keys: tuple[str, ...]


@record
class Listening(Message):
    """From a worker: other replicas may ask it at this address. Repeated until `ListeningNoted`."""

    slot: int
    epoch: int
    address: str


UNMADE = "unmade"
MODEL_LOST = "model-lost"


@record
class Group(Message):
    """To a worker: the group of this generation. Repeated until `GroupNoted`; only the newest
    counts, and whoever is not in `slots` has no group.
    """

    generation: int
    slots: tuple[int, ...]
    """In the order of their ranks."""
    store: str
    """host:port of the rendezvous; "": open it, to the first member."""
    is_new: bool
    """Nothing is trained yet: whoever has made no sum has the model that the run begins with."""


@record
class GroupNoted(Message):
    name: str
    generation: int
    store: str
    """Of the first member, when it has opened it; else ""."""


@record
class GroupBroken(Message):
    """From a member: a collective of this generation has failed or passed its deadline. Repeated
    until there is another generation."""

    slot: int
    epoch: int
    generation: int
    reason: str
    why: str
    """UNMADE: the members have not found each other. MODEL_LOST: they have, and none of them has
    what the group has come to. Else ""."""


@record
class ListeningNoted(Message):
    slot: int
    epoch: int


# ------------------------------------------------------------ control plane: one decider


@record
class Holding(Message):
    """From a server: all pushes that it holds until the lead decides. Sent at every change and a
    while after it again; the newest `number` of the newest generation counts.
    """

    shard: int
    generation: int
    number: int
    clock: int
    """Of the shard: the steps before it are made, and would be found by the next server."""
    pushes: Array
    """int64[3 n]: clock, slot and epoch of each."""


@record
class Decided(Message):
    """To a server: which pushes of this clock count. The answer to a `Holding` of a shard that has
    not come so far.
    """

    clock: int
    used: Array
    """int64[2 n]: slot and epoch of each."""
    gone: Array
    """int64[2 n]: of these, who has died since. More and more of them, never fewer."""


@record
class NormPart(Message):
    """From a server: what its shard's update at this clock adds to the square of the norm by which
    all shards clip theirs. Repeated until `NormTotal`.
    """

    shard: int
    generation: int
    clock: int
    squared: float


@record
class NormTotal(Message):
    """To a server: the sum of the parts of all shards."""

    clock: int
    squared: float


# ------------------------------------------------------------ control plane: samples


@record
class SampleFailed(Message):
    """From a worker: a sample could not be loaded, and its batch went on without it. Repeated until
    `SampleNoted`; each counts once in a data epoch."""

    slot: int
    epoch: int
    data_epoch: int
    sample: int
    """Its number in the dataset."""
    error: str
    detail: str
    """The traceback."""


@record
class SampleNoted(Message):
    data_epoch: int
    sample: int
