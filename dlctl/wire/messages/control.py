"""The control plane: coordinator, agents, daemons and the command line."""

from __future__ import annotations

from dataclasses import field

from dlctl.util.record import record
from dlctl.wire.messages.base import Array, Json, Message, Signed, Sum

# ------------------------------------------------------------ control plane: joining and leaving


@record
class Register(Message):
    """A daemon has started, and this is its identity. Repeated until `Welcome` is received, so it
    must be idempotent.
    """

    run_id: str
    role: str
    name: str
    incarnation: int
    pid: int
    host: str
    version: str


@record
class Welcome(Message):
    """To a worker: its slot. To a server: its shard."""

    name: str
    index: int
    term: int
    """The term of the slot or of the shard."""
    token: bytes
    """To a worker: the proof of its term. To a server: the key by which it verifies those."""
    settings: Json
    """The initial settings."""
    finds: bool = False
    """To a worker: find the largest batch size that fits into memory."""


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
    """Samples of a data epoch."""
    has_finish: bool = False
    """Whether the task has a `finish`."""
    frozen: bytes = b""
    """Digests of its frozen parameters (`dlctl/model/frozen.py`)."""
    lacks_weights: bool = False
    """The job's initial values are missing on its host: its parameters are not those of the run."""
    order: str = ""
    """Digest of the sample order chosen by the task; "": the task chooses none."""
    batch_size: int = 0
    """The largest that fits into memory; 0: the worker was not requested to find it."""
    shards: int = 0
    """Shards of a dataset that is a stream, whose length is unknown; 0: not a stream."""
    clients: tuple[int, ...] = ()
    """The samples of each client, if the dataset is partitioned into clients."""
    names: bytes = b""
    """The names of the shards, one a line, in the order of the dataset's list; empty: they have
    only numbers. In every other message a shard is a number: its place among the sorted names
    (`util/listing.py`).
    """
    files: str = ""
    """Digest of the files that a map-style dataset lists; "": it lists none."""
    has_own_data: bool = False
    """The worker's training loop has data of its own, of which it counts the samples."""
    values: str = ""
    """Digest of the values that a training loop's model has at first, where no server and no other
    replica replaces them; "": they do, or the run's seed determines them."""


@record
class Assign(Message):
    """To a server: own the elements between two of the bounds, by its number."""

    bounds: tuple[int, ...]
    """Of the shards of all servers (`dlctl/model/cut.py`)."""
    layout: bytes
    restore: str
    """Directory of a checkpoint, or ""."""
    keep: bool = False
    """Another server of this shard has sent `Serving`: resume from the state that it persisted, or
    fail. False: start over, whatever exists; `restore` applies only then."""
    samples: int = 0
    """The size of the dataset: a schedule depends on the length of the run."""
    step_samples: int = 0
    """The most samples of one step of a worker: no push has more per step."""
    cut: int = 0
    """The number of the newest cut of a run under way: `restore` was saved for it, and the numbers
    of the pushes that this shard has taken continue. 0: the cut with which the run has begun."""


@record
class Serving(Message):
    """Answer to `Assign`: the server owns its shard and listens at `address`."""

    name: str
    address: str
    initialised: bool


@record
class Topology(Message):
    """To a worker: all servers in shard order. One worker is asked to initialise empty shards."""

    addresses: tuple[str, ...]
    keys: tuple[str, ...]
    """The servers' public keys; "" for connections without."""
    bounds: tuple[int, ...]
    """Of their shards (`dlctl/model/cut.py`)."""
    initialise: bool
    restore: str
    under_way: bool = False
    """All workers have been running: a worker that starts now joins a run under way."""
    frozen: bytes = b""
    """Digests of the run's frozen parameters: a worker with different ones loads those."""
    batch_size: int = 0
    """Samples of one batch of this worker; 0: `workers.batch_size`."""
    first: int = 0
    """The number of the first of these servers: with parties a worker knows those of its side."""
    base: int = 0
    """Where the first bound is in the vector of the run."""
    cut: int = 0
    """The number of the cut that has these bounds."""


@record
class Moved(Message):
    """To a worker: a new process owns this shard. Repeated until `Noted`."""

    shard: int
    term: int
    address: str
    key: str


@record
class Noted(Message):
    """From a daemon: it has received the coordinator's message with this number."""

    name: str
    what: str
    """"allowed_peers", "peers", "bounds", or "moved" and the number of a shard."""
    number: int


@record
class Members(Message):
    """To a server: the slots that take part now. Barriers count these."""

    slots: tuple[int, ...]
    scale: tuple[float, ...] = ()
    """`schedule.Scale`, if the rate depends on the intended number of workers."""


@record
class AllowedPeers(Message):
    """To a server: who may connect. Repeated until `Noted`; the newest `number` counts."""

    number: int
    names: bytes
    """JSON: public key -> name. There may be more than fit into a header."""


@record
class Report(Message):
    """Sent about once a second, and whenever the phase changes; also a daemon's heartbeat."""

    name: str
    incarnation: int
    phase: str
    waiting_for: str
    """Names of the daemons it waits for, or ""."""
    metrics: Json


@record
class Heard(Message):
    """The answer to each report, and to a daemon that registers again: the coordinator is alive."""


@record
class Failed(Message):
    """The user's code, or this daemon, cannot continue. `detail` is the traceback."""

    name: str
    error: str
    detail: str
    fatal: bool
    """True: a restart would fail in the same way."""


# ------------------------------------------------------------ control plane: data


@record
class LeaseRequest(Message):
    """Request a portion. Repeated with the same `request` until an answer is received."""

    slot: int
    term: int
    request: int
    ahead: bool
    """The worker still has work: grant one more only if enough is left for the others."""
    ends: tuple[int, ...] = ()
    """An end of stream that this worker has found: data epoch, shard of the stream, its samples."""


@record
class Lease(Message):
    """Samples [start, stop) in the shuffled order of `data_epoch`, or of a shard of a stream, which
    may end before, or of a client. start == stop: none now, retry later.
    """

    request: int
    portion: int
    data_epoch: int
    start: int
    stop: int
    samples: int = 0
    """The samples done by all workers."""
    shard: Signed = -1
    """The shard of the stream, or the client; -1: the dataset has none."""


@record
class PortionDone(Message):
    """All gradients of a portion are in acknowledged pushes. `loss_sum` is over its samples; it is
    infinite if the last of these pushes was refused, or empty because the steps were not finite.
    """

    slot: int
    term: int
    data_epoch: int
    portion: int
    steps: int
    samples: int
    loss_sum: Sum
    metric_sums: Json = field(default_factory=dict)
    """Other metrics of the task's loss: name -> [sum over samples, samples that have it]."""
    end: Signed = -1
    """The samples of the stream's shard, if it ended in this portion; else -1."""


@record
class PortionNoted(Message):
    """The coordinator has recorded that a portion is done."""

    data_epoch: int
    portion: int


# ------------------------------------------------------------ control plane: changes and ends


@record
class ChangeSettings(Message):
    """Apply these settings. Repeated until `Changed`; idempotent."""

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
    """To a server: the run ends with this checkpoint, so apply no more pushes. They would be
    acknowledged, but in no checkpoint."""


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
    """Run the task's `finish` instead, with `metrics`."""
    metrics: Json = field(default_factory=dict)
    average: bool = False
    """Use the moving average of the parameters."""


@record
class Evaluated(Message):
    evaluation: int
    name: str
    metrics: Json
    error: str
    text: str = ""
    """The output and the result of `finish`."""
    method: Json = field(default_factory=dict)
    """Figures of the method about the evaluated model."""


@record
class Drain(Message):
    """To a worker: finish the step, push the residual, wait for the acks, then send `Drained`."""

    reason: str


@record
class Drained(Message):
    name: str


@record
class Shutdown(Message):
    """Exit now, in an orderly way. The last message to a daemon."""

    reason: str
    keep_state: bool = False
    """To a server: do not remove its shard's state, the run may be recovered from it."""
    ended: str = ""
    """The run's state: finished, stopped or failed; "": the run goes on without this daemon."""


# ------------------------------------------------------------ control plane: processes of a host


@record
class Spawn(Message):
    """To an agent: run this incarnation of a daemon. Repeated until it reports; idempotent."""

    name: str
    role: str
    incarnation: int
    secret: str
    """The daemon's secret key; "" for connections without."""
    job: bytes = b""
    """To a guest, which has no file of the run: the job."""


@record
class Spawned(Message):
    """From an agent: the incarnation has this pid. Answers `Spawn`."""

    name: str
    incarnation: int
    pid: int


@record
class Kill(Message):
    """To an agent: terminate this incarnation; `signal` is 15 or 9."""

    name: str
    incarnation: int
    signal: int


@record
class ProcessExited(Message):
    """From an agent. Repeated until `ExitNoted`. `status` is negative for a process that was killed
    by a signal."""

    name: str
    incarnation: int
    status: Signed
    last_lines: tuple[str, ...]
    cause: str = ""
    """Why a signal killed it, if the host knows: "out of memory: limit 64 MiB". Of one that exited,
    that it logged no reason (`crash_loops.UNSAID`)."""


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
    """`done` is False while the work is in progress: `result` then has the progress."""

    request: int
    done: bool
    error: str
    result: Json
    data: bytes = b""
    """If not empty, the result: JSON, compressed by zlib. A header has no room for the reports of
    all daemons, which may be as large as a header each."""


# ------------------------------------------------------------ control plane: answers


@record
class RegisterAgain(Message):
    """To an agent that reports: this coordinator has no record of its registration."""


@record
class Reopen(Message):
    """To a server: the run continues, checkpoint `last` was not its last one. Sent only to a server
    whose reports say that it was.
    """

    last: int


# ------------------------------------------------------------ control plane: replicas


@record
class Peers(Message):
    """To a worker: the workers that take part now, or are about to. Repeated until `Noted`; the
    newest `number` counts.
    """

    number: int
    slots: tuple[int, ...]
    joining: tuple[int, ...]
    """The slots that do not take part yet: they may send requests, but not answer any."""
    terms: tuple[int, ...]
    addresses: tuple[str, ...]
    """"" for a worker that does not listen yet."""
    keys: tuple[str, ...]


@record
class Listening(Message):
    """From a worker: other replicas may send requests to this address. Repeated until
    `ListeningNoted`."""

    slot: int
    term: int
    address: str


UNMADE = "unmade"
MODEL_LOST = "model-lost"


@record
class Group(Message):
    """To a worker: the group of this generation. Repeated until `GroupNoted`; only the newest
    counts, and a worker that is not in `slots` has no group.
    """

    generation: int
    slots: tuple[int, ...]
    """The slots of the group's members, in the order of their ranks."""
    store: str
    """host:port of the rendezvous; "", to the first member: open it."""
    is_new: bool
    """Nothing is trained yet: a member that has made no sum has the run's initial model."""


@record
class GroupNoted(Message):
    name: str
    generation: int
    store: str
    """From the first member, once it has opened the rendezvous; else ""."""


@record
class GroupBroken(Message):
    """From a member: a collective of this generation has failed or exceeded its deadline. Repeated
    until the next generation."""

    slot: int
    term: int
    generation: int
    reason: str
    why: str
    """UNMADE: the members have not connected to each other. MODEL_LOST: they have, but none of them
    has the group's model. Else ""."""


@record
class ListeningNoted(Message):
    slot: int
    term: int


# ------------------------------------------------------------ control plane: one decider


@record
class Holding(Message):
    """From a server: all pushes that it holds until the lead decides. Sent at every change and
    resent a while later; the newest `number` of the newest term counts.
    """

    shard: int
    term: int
    number: int
    clock: int
    """The clock of the shard: the steps before it are committed, and survive the server."""
    pushes: Array
    """int64[3 n]: clock, slot and term of each."""


@record
class Decided(Message):
    """To a server: which pushes of this clock count. The answer to a `Holding` of a shard that has
    not passed this clock.
    """

    clock: int
    used: Array
    """int64[2 n]: slot and term of each."""
    gone: Array
    """int64[2 n]: of these, the processes that have died since. The set only grows."""
    cut: int = 0
    """Behind this step the model is cut anew: take and answer nothing until a `Recut` of this
    number. 0: go on."""


@record
class NormPart(Message):
    """From a server: the share of its shard's update at this clock in the squared norm by which all
    shards clip theirs. Repeated until `NormTotal`.
    """

    shard: int
    term: int
    clock: int
    squared: Sum


@record
class NormTotal(Message):
    """To a server: the sum of the parts of all shards."""

    clock: int
    squared: Sum


# ------------------------------------------------------------ control plane: samples


@record
class SampleFailed(Message):
    """From a worker: a sample could not be loaded, and its batch continued without it. Repeated
    until `SampleNoted`; each counts once in a data epoch. It is sent before `PortionDone`: the
    report of a worker that does not have the portion any more is ignored.
    """

    slot: int
    term: int
    data_epoch: int
    sample: int
    """The index of the sample in the dataset."""
    error: str
    detail: str
    """The traceback."""
    portion: int = 0
    """The portion that has the sample."""


@record
class SampleNoted(Message):
    data_epoch: int
    sample: int


# ------------------------------------------------------------ control plane: guests


@record
class WantSlot(Message):
    """From a guest: it would start a worker. Repeated until it is sent `Spawn`."""

    name: str


@record
class InLine(Message):
    """To a guest that waits for a slot."""

    place: int
    """How many guests get one before it, plus one; 0: the run does not give out any yet."""
    reason: str
    """Why no slot is free."""


@record
class Leaving(Message):
    """From a guest: its user wants to leave, so its worker drains. Repeated until it has exited."""

    name: str


# ------------------------------------------------------------ control plane: another cut


@record
class Recut(Message):
    """To a server that has paused for this cut: how it goes on. Repeated while its reports say that
    it has paused.
    """

    cut: int
    is_made: bool
    """The coordinator has recorded the cut: drop the shard, and register again for the new one.
    False: it was given up; go on."""


@record
class NewBounds(Message):
    """To a worker: all servers have the shards of this cut. Repeated until `Noted`."""

    number: int
    bounds: tuple[int, ...]
    clock: int
    """All shards are at this step, and pushes for earlier ones are settled. So no push with the old
    bounds has values that a shard still needs."""
