"""The job: what a job file says, as frozen dataclasses. Every key is documented under its field.

The text under each field is the manual: `dlctl-job(5)` is generated from it. Limits stand in the
types, so that `jobfile/` reports every violation at once, with file and line. Daemons read the
resolved job (`job.json` in the run directory) with `from_dict` and need no validator.

Options of an algorithm, compressor or optimiser stand next to their owner.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt

from dlctl.util.numeric_limits import PushNorm, WeightDecay

STRICT = {"extra": "forbid", "strict": True}
"""Config for the validator: an unknown key is an error and "4" is not 4."""

PARTS_MAX = 8
"""Parts of one push, each of at most four arrays: they all have to be frames of one message."""
COUNT_MAX = 4096
Count = Annotated[int, Ge(1), Le(COUNT_MAX)]
Seconds = Annotated[float, Gt(0), Le(1e7)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When the run has finished: the first of these that is reached."""

    __pydantic_config__ = STRICT

    epochs: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Passes over the dataset; 0.5 is half of it. Not with a stream, whose length nobody knows."""
    steps: Annotated[int, Ge(1)] | None = None
    """Steps of all workers together."""
    samples: Annotated[int, Ge(1)] | None = None
    """Samples of all workers together."""
    seconds: Seconds | None = None
    """Seconds since the workers were released."""
    target: str | None = None
    """A metric of the task's `evaluate` and a bound: "accuracy >= 0.85". If `evaluate` does not
    return that metric, `status` and `events` say so, and a run with no other limit fails.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    __pydantic_config__ = STRICT

    name: Annotated[str, Len(1, 64)]
    """Letters a-z, digits, dot, underscore, dash; begins with a letter or digit."""
    task: str
    """Where the model, data and loss are: "train.py:task", a path beside the job file and a name in
    it.
    """
    stop: Stop = Stop(epochs=1)
    """When the run has finished, for example { epochs = 3 } or { target = "accuracy >= 0.85" }."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seeds the model's initial values and the order of the samples, all that the task's file draws
    while it is imported, and the hashes of Python: a set of words has one order in all workers."""
    weights: str = ""
    """Values to begin with instead of those of model(): a .safetensors file, or a directory of
    such, with names as in model().state_dict(); relative to the job file. On other hosts it is
    looked for at the same full path; a worker that has not got it takes the run's values, but
    worker-0 and those of methods whose replicas begin by themselves need it. "": model()'s own."""
    strict: bool = True
    """Whether all names and shapes of `weights` and of the model have to match. If not, those that
    do are used, and a warning lists the others."""
    run_dir: str = "runs"
    """Where run directories are made, relative to the job file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A name from the registry and that entry's own options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


DEFAULT_ALGORITHM = "downpour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The rate over the run, by the samples that all workers have had. It scales every optimiser
    that takes gradient steps: the replicas' own (`inner`), and the servers' one where gradients are
    pushed to it; not the one that takes the steps of whole rounds."""

    __pydantic_config__ = STRICT

    kind: Literal["constant", "linear", "cosine", "wsd", "step"] = "constant"
    """What follows the warm-up. "wsd": stable, then a straight decay; "step": times gamma at each
    of decay_at."""
    warmup: str = "0 steps"
    """From 0 straight to the peak: "5%" of the run, "500 steps" or "10_000 samples"; steps are
    those of all workers together."""
    final: Annotated[float, Ge(0), Le(1)] = 0.0
    """Part of the peak at the end of the run, of "linear", "cosine" and "wsd"."""
    decay_at: tuple[Annotated[float, Gt(0), Lt(1)], ...] = ()
    """Parts of the run: where "step" goes down, and where the decay of "wsd" begins (0.9)."""
    gamma: Annotated[float, Gt(0), Le(1)] = 0.1
    """What "step" multiplies by."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the rate goes with the number of workers, for methods that average gradients, as "sync"
    (Goyal 2017): lr is that for lr_workers of them, with N it is N / lr_workers times as much, or
    the square root of that. After "dlctl scale" it goes there by equal amounts over the length of
    the warm-up. If the run begins with another number than lr_workers, its warm-up goes from lr to
    the rate for that number, and not from 0. Workers that die and come back change nothing."""
    lr_workers: Annotated[int, Ge(0), Le(COUNT_MAX)] = 0
    """How many workers lr is for; 0: workers.count."""
    over: str = ""
    """How long the run is taken to be: "50_000 steps" or "1_000_000 samples"; "": what `job.stop`
    says, which it has to if that is seconds or a target alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What a replica does with a gradient before it is used."""

    __pydantic_config__ = STRICT

    clip_norm: Annotated[float, Ge(0)] = 0.0
    """The most that its Euclidean norm may be: it is made as long as that, as
    torch.nn.utils.clip_grad_norm_ does; 0: no limit."""
    clip: Literal["replica", "global"] = "replica"
    """What is clipped: each replica's gradient by itself, or what an update of the servers is made
    of: with "sync" the mean of all, which is what one process would clip. "global" needs a method
    that pushes gradients, and one server where it does not average them. Several servers add up
    their parts of the norm by way of the coordinator, one more round trip for every step."""
    accumulate: Annotated[int, Ge(1), Le(65536)] = 1
    """So many batches of `workers.batch_size`, one after the other, are one step: their gradient is
    that of all their samples."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the forward pass, by torch.autocast. "fp16" scales the loss, as torch.amp.GradScaler does:
    a step whose gradient is too large for it is skipped, and counts as none."""
    compile: bool = False
    """torch.compile of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained in another way than the others, or not at all. The first group
    with a pattern for a parameter is its own; what has none is trained as if there were no groups.

    Rates and decays are those of every optimiser that takes gradient steps: the replicas' own
    (`inner`), and the servers' one where gradients are pushed to it; not of the one that takes the
    steps of whole rounds.
    """

    __pydantic_config__ = STRICT

    match: tuple[str, ...]
    """Names of parameters, as in model().named_parameters(), with * for anything, ? for one
    character and [ab] for one of several: ["*.bias", "*norm*"]. A tied parameter goes by any of its
    names. Every pattern has to match something."""
    weight_decay: WeightDecay | None = None
    """Instead of the optimiser's; 0: none. lr times lr_scale times it is at most 1 on the servers.
    """
    lr_scale: Annotated[float, Ge(0), Le(1e6)] = 1.0
    """The rate is the optimiser's times this, whatever schedule and `dlctl set` make of that."""
    train: bool = True
    """false: they stay as they are. requires_grad is False before the first step, and they are
    in no push and no fetch; buffers beside them, such as a BatchNorm's, go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    __pydantic_config__ = STRICT

    count: Annotated[int, Ge(0), Le(256)] = 1
    """Parameter servers; each owns one contiguous shard of every table. 0 with a method that needs
    none, and only then; there it is 0 if nothing is said."""
    durability: Literal["process", "none", "disk"] = "process"
    """What an acknowledged push survives. "process": the death of its server at any instant; the
    shard is kept in mapped memory, twice. "disk": a power loss, too; every push is on the disk
    before it is acknowledged. "none": neither; what came after the last checkpoint is lost."""
    state_dir: str = ""
    """Where the servers keep their shards, a full path. "": shared memory (/dev/shm) if there is
    room, else the run directory; with durability = "disk" always the run directory."""
    push_norm_max: PushNorm = 1e9
    """A push with a larger Euclidean norm is refused, as one with a NaN is; a worker leaves out a
    single gradient of which such a push would come. With that, and the limits of lr, weight_decay
    and eps, no number of pushes makes a weight or the optimiser's state infinite or NaN. Should an
    update do so all the same, as with an optimiser of somebody else's, nobody gets to see it: its
    server ends, and the run fails and says so."""
    fetch_values: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the parameters that workers fetch. "float16" (11 significant bits) and
    "bfloat16" (8) halve the bytes of all values, for slow links. The servers keep theirs in
    float32, and what the rounding takes away is made up for in later versions: on average workers
    see what the servers have. Evaluations, checkpoints and the model at the end are not rounded.
    Costs a server 6 bytes per parameter, and a pass over what is new of each version that is
    fetched. A shard with a value beyond the format, 65504 for "float16", sends float32 from then
    on. The precision of pushes is the compressor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    __pydantic_config__ = STRICT

    count: Count = 1
    """Model replicas."""
    batch_size: Annotated[int, Ge(1)] | Literal["auto"] = 32
    """Samples of one batch of one worker; a step is one, or several: `gradient.accumulate`. "auto":
    worker-0 finds the largest power of two that there is memory for, before the first step, by
    forward and backward passes of real samples; all workers have that, and the run keeps it when it
    goes on. At most 65536 on a GPU, of which a tenth stays free, and 1024 on the CPU, where half of
    the memory stays free and a batch need not take more than 5 s; and so small that an epoch has a
    portion for each worker. `dlctl status` shows it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the replicas compute; "auto" takes a GPU if torch finds one, and spreads the workers
    over all.
    """
    processes: Annotated[int, Ge(1), Le(256)] = 1
    """Processes of each replica, on one host, with a model each; more than 1 only with a method
    that can use them. They live and die together."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """Threads of torch per worker, all of its processes together; 0: this machine's cores divided
    by its workers."""
    loader_processes: Annotated[int, Ge(0), Le(256)] = 0
    """Processes of torch's DataLoader per worker; 0: the data is loaded in the worker itself. A
    stream is read by one of them."""
    restarts_max: Annotated[int, Ge(0)] = 8
    """How often in a row a worker is replaced that has died before it was at work, or within 10 s
    of its start; when it does so once more, the run fails. One that was at work for up to 10 min
    counts, too, if it has ended by itself as the one before (same exit code, or crash): then it is
    quarantined instead.
    """
    nonfinite_steps_max: Annotated[int, Ge(1)] = 20
    """Steps in a row with a NaN or infinite loss or gradient, or a gradient above what
    servers.push_norm_max allows, after which a worker is quarantined: it is not replaced until
    "dlctl restart" asks for it. They are left out, and nothing of them is pushed. After 10 in a row
    a replica goes on from what the servers have, as it may have ruined itself.
    """
    refused_pushes_max: Annotated[int, Ge(1)] = 3
    """Pushes in a row that the servers refuse after which a worker is quarantined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """How the model of one worker is cut over several processes of its host: in one of three ways,
    with a GPU for each process where there are some. They live and die together. A checkpoint is
    the same whatever the shape, so a run may go on with another one. What the method keeps lies in
    the host's memory, and each process has a part of it, and compresses its part of every push. The
    worker itself, the first process, evaluates alone, with the values of one module after the other
    or, on a GPU, with the whole model; the others are idle meanwhile. Needs a method with servers;
    an inner optimiser steps slices, or with stages whole parameters. With fsdp the buffers of the
    model, as of BatchNorm, are those of the first process."""

    __pydantic_config__ = STRICT

    fsdp: Annotated[int, Ge(1), Le(256)] = 1
    """So many processes have the parameters, gradients and optimiser states in slices, by FSDP2
    (fully_shard) over the modules in nn.Sequential and nn.ModuleList, and each computes its part of
    every batch. A task's `parallelize(model, mesh)` takes the place of fully_shard."""
    tensor: Annotated[int, Ge(1), Le(256)] = 1
    """So many processes compute every batch together, by tensor parallelism:
    `task.tensor_plan(model)` says which modules are cut, {"blocks.*.hidden": "colwise",
    "blocks.*.out": "rowwise"}; the others are whole in each. Or `task.parallelize(model, mesh)`
    does it."""
    pipeline: Annotated[int, Ge(1), Le(256)] = 1
    """So many stages, one behind the other: the modules of the nn.Sequential or nn.ModuleList that
    can be cut best, as many bytes in each as can be; `task.stages(model)` may say it, with a list
    of names of modules for each stage."""
    microbatches: Annotated[int, Ge(0), Le(4096)] = 0
    """What a batch is cut into for the stages; 0: twice as many as there are stages, and no more
    than it has samples."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """How these go through: "gpipe" computes all of them forward before the first backward; "1f1b"
    as few as it can, which keeps fewer activations."""

    hogwild: Annotated[int, Ge(1), Le(256)] = 1
    """So many processes step in one model without locks, each along batches of its own. For methods
    that push gradients, with `[inner]` SGD, on the CPU."""

    @property
    def ranks(self) -> int:
        """The processes of a replica."""
        return self.fsdp * self.tensor * self.pipeline

    @property
    def pieces(self) -> int:
        """What each batch is cut into."""
        if self.pipeline > 1:
            return self.microbatches or 2 * self.pipeline
        return self.fsdp


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    __pydantic_config__ = STRICT

    portion_batches: Annotated[int, Ge(1), Le(100000)] = 8
    """Batches of one portion: the range of samples that a worker leases at a time. With batch sizes
    of hosts these are the largest ones."""
    lease_ahead_s: Annotated[float, Ge(0), Le(3600)] = 2.0
    """Seconds of work that a worker leases in advance: so long it goes on while the coordinator is
    away. Towards the end of a run it is less, so that all finish together.
    """
    shuffle: bool = True
    """A new seeded order of the samples in every epoch; false: their own. A task with a `sampler`
    or `sample_weights` says itself which come and in which order. A stream has its own order."""
    clients: Annotated[int, Ge(0), Le(100000)] = 0
    """Clients of federated training that the dataset is cut into. Then a portion is one client, and
    a data epoch is a round: the clients that the method draws for it. 0: there are none."""
    partition: Literal["iid", "shards", "dirichlet", "task", "workers"] = "iid"
    """Whose samples are whose, with `clients`. "iid": anybody's, as many for each. "shards": two
    pieces of the samples sorted by label (McMahan 2017). "dirichlet": of each label, the parts that
    clients have are drawn with `alpha`. "task": as `task.clients(dataset)` says, a number for each
    sample. Labels are the dataset's `targets` or `labels`, else what comes last in a sample.
    "workers": data stays where it is; client c is trained by worker c mod `workers.count` and no
    other, which alone calls `task.dataset(c)`; `task.client_sizes()` says to all how many samples
    each client has."""
    alpha: Annotated[float, Gt(0)] = 0.5
    """Of "dirichlet": the smaller, the more the clients differ."""
    bad_samples_max: Annotated[int, Ge(0), Le(100000)] = 0
    """So many samples of the dataset may fail to load in an epoch, in all workers together: each is
    named in "dlctl events", and its batch goes on without it; a batch of which none is left is left
    out. One more ends the run. 0: the first one does, and of a stream always. The coordinator
    counts; one that takes the place of another begins anew. What goes wrong in making a batch of
    samples is no failure of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What each worker may send. All of these change live with `dlctl set`."""

    __pydantic_config__ = STRICT

    push: str = "off"
    """Rate at which a worker pushes: "100Mbit/s", "5MB/s" or "off"."""
    fetch: str = "off"
    """Rate at which a worker fetches: "100Mbit/s", "5MB/s" or "off"."""
    push_window: str = "128MB"
    """Bytes of a worker's pushes that may be in flight: below that it may begin another one, of
    any size; as many as four in any case. Less saves memory and staleness, more keeps a long link
    full. "off": only their number counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    __pydantic_config__ = STRICT

    every_s: Annotated[float, Ge(0)] = 60.0
    """Seconds between checkpoints; 0: only when the run stops or finishes."""
    keep: Annotated[int, Ge(1)] = 3
    """Checkpoints that are kept; older ones are removed. What a run saves because it has failed
    takes the place of no other one: up to as many of those are kept besides."""
    best: str = ""
    """A metric of the task's `evaluate`, and which end of it is good: "val_loss min" or "accuracy
    max". A checkpoint is saved as soon as an evaluation has found a better one than all before, and
    the one with the best stays besides the newest `keep`: "dlctl checkpoint export best" has its
    model. What was trained while that was evaluated is in it, too; at the end of the run nothing
    is. "": none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    __pydantic_config__ = STRICT

    every_epochs: Annotated[float, Ge(0)] = 1.0
    """Epochs between evaluations by worker-0; 0: only at the end. Of a stream, passes over it."""
    every_steps: Annotated[int, Ge(0)] = 0
    """Steps of all workers together between evaluations, instead of epochs; 0: as every_epochs
    says."""
    finish_s: Seconds = 60.0
    """The most that the task's `finish(model, metrics)` may take, if it has one, with all that it
    takes to fetch the model. It runs once, on
    one worker, when the run has finished: after the last evaluation and the last checkpoint, with
    that model in eval mode. What it prints is in the worker's log; that and the text that it
    returns are shown by `dlctl run` at the end. If it raises an error, takes longer, or its worker
    dies, that is a warning and the run has finished all the same; of a worker that dies it is begun
    once more on another one, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """An exponential moving average of the parameters, kept by the servers beside them."""

    __pydantic_config__ = STRICT

    ema: Annotated[float, Ge(0), Lt(1)] = 0.0
    """How much of the average stays at each update of the servers, as 0.999; 0: none is kept. It
    begins with the initial parameters, and is in checkpoints: "dlctl checkpoint export --average"
    has its model. Costs a server 4 bytes per parameter and one pass more over an update. With
    compressed pushes it costs more: each is applied, and fetched, as if all of it had been pushed,
    zeros where there was nothing; of an optimiser with momentum these elements move on, too."""
    evaluate: bool = False
    """Whether the task's `evaluate` and `finish`, and with them job.stop.target and
    checkpoints.best, are of the average in place of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Where the figures of the run go besides its own database, from which `dlctl status`, `top`,
    `report` and `plot` read. The coordinator writes them: one run, however many workers."""

    __pydantic_config__ = STRICT

    tensorboard: bool = False
    """Whether to write event files for TensorBoard, into the directory `tensorboard` of the run:
    loss, what else the task's loss returns, evaluations, rates, staleness, bytes. Look at all runs
    with "tensorboard --logdir runs". Needs "pip install 'dlctl[tensorboard]'"."""
    prometheus_port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port at which Prometheus finds the run's figures, at /metrics; 0: none. Needs "pip install
    'dlctl[prometheus]'". If the port is taken, training goes on, a warning says so, and it is tried
    again."""
    prometheus_address: Annotated[str, Len(1, 255)] = "127.0.0.1"
    """Address of this machine at which that port is. The figures are neither encrypted nor
    protected: whoever reaches the address reads them. On the default only this machine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    __pydantic_config__ = STRICT

    transport: Literal["ipc", "tcp"] = "ipc"
    """"ipc": unix sockets in a directory only this user can enter. "tcp": ports on 127.0.0.1;
    with other hosts always, and on addresses that these can reach."""
    encryption: Literal["curve", "none"] = "curve"
    """With "tcp": "curve" encrypts every connection, with a key for every daemon, and lets only
    these keys in. "none" is faster, and open to every user of this machine.
    """
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """With "tcp": the coordinator's port, servers take the ones after it, and behind these workers
    whose method lets replicas ask each other; 0: any free ports."""
    private: bool = False
    """With hosts: only who may see and change everything of this run is in their network. What
    `allreduce` sends from host to host goes through torch.distributed, neither encrypted nor
    authenticated, and is refused without this."""
    address: str = ""
    """With hosts: where they reach this machine; "": the address from which it reaches them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine that takes part; without any, all daemons run on this one."""

    __pydantic_config__ = STRICT

    ssh: str = ""
    """What "ssh NAME" takes, an alias of your ssh configuration included. "": this machine."""
    data: str = ""
    """Address at which the other hosts reach the daemons of this one, if it is not the one that ssh
    connects to; often another network card.
    """
    bind: str = ""
    """Address at which they listen, if it is not `data`: behind a forwarding, for example."""
    servers: Annotated[int, Ge(0), Le(256)] | None = None
    """Parameter servers here; without it an even share of those that no host has asked for."""
    workers: Annotated[int, Ge(0), Le(COUNT_MAX)] | None = None
    """Workers here; likewise. 0: none, and none are added as long as there is another host."""
    batch_size: Annotated[int, Ge(1)] | None = None
    """Samples of one batch of each worker here; without it `workers.batch_size`. What a batch is
    worth follows from its samples. Where the job file says steps and samples are meant, as in
    [schedule], they are those of the mean over all workers; `job.stop` counts the steps made."""
    python: str = ""
    """The Python there that has dlctl and torch; "": at the same path as here."""
    dir: str = ""
    """Where dlctl keeps its files there, a full path; "": ~/.local/state/dlctl/hosts."""

    @property
    def launcher(self) -> str:
        """The name of the launcher that reaches it, as in the registry."""
        return "ssh" if self.ssh else "local"

    @property
    def is_other(self) -> bool:
        """Whether it is another machine than the coordinator's."""
        return self.launcher != "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Host):
    """A node that Slurm chooses. Its name is known when its agent speaks."""

    @property
    def launcher(self) -> str:
        return "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """The job of a batch system; there are no [[hosts]] then."""

    __pydantic_config__ = STRICT

    nodes: Annotated[int, Ge(0), Le(1024)] = 0
    """Nodes of the job, with an agent on each; servers and workers are spread over them."""
    partition: str = ""
    """Where to run; "": Slurm's default, as with all that follows."""
    time: str = ""
    """Time limit of the job, as in "90m" or "2h"; Slurm counts whole minutes."""
    account: str = ""
    """Whom it is charged to."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that the nodes must have, as in "gpu&ib"."""
    cpus_per_node: Annotated[int, Ge(0), Le(65536)] = 0
    """Processors of each node; 0: what Slurm gives, which may be one."""
    gpus_per_node: Annotated[int, Ge(0), Le(1024)] = 0
    """GPUs of each node."""
    memory: str = ""
    """Memory of each node, as sbatch takes it: "16G"; "0" is all of it."""
    extra: tuple[str, ...] = ()
    """More options of sbatch, one text each, without quotes of their own: ["--exclusive",
    "--comment=for ann"]."""
    requeue: bool = False
    """Whether Slurm may queue the job again when it was preempted, or a node has failed. The run
    waits meanwhile, and goes on if its shards are still on their nodes."""
    queue_s: Seconds = 86400.0
    """Longest wait in the queue, after which the job is cancelled and the run has failed."""
    notice_s: Annotated[float, Ge(0), Le(65535)] = 120.0
    """How long before the time limit the run is saved and stopped; Slurm may be 60 s early."""
    python: str = ""
    """The Python on the nodes that has dlctl and torch; "": at the same path as here."""
    dir: str = ""
    """A directory that this machine and all nodes share, a full path: for orders and answers;
    "": ~/.local/state/dlctl/slurm."""
    scratch: str = ""
    """Where dlctl keeps its files on each node, a full path; "": /tmp/dlctl-slurm-USERID."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every wait ends: these are the ends, in seconds."""

    __pydantic_config__ = STRICT

    ready_s: Seconds = 300.0
    """From start until all daemons are ready, the user's imports and model() included."""
    silent_s: Seconds = 15.0
    """A daemon that sends no heartbeat for so long is replaced."""
    host_s: Seconds = 120.0
    """Without a word from a host after which it is given up: its workers are started on the others.
    With servers on it the run fails then; `dlctl recover` goes on if the host is back, and without
    it the run goes on from its newest checkpoint.
    """
    resend_s: Seconds = 1.0
    """Without an acknowledgement after which a push or fetch is sent again; doubles up to 4 times.
    """
    grace_s: Seconds = 30.0
    """For a stopping worker to finish its step and its last pushes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A whole job file: one section per field."""

    __pydantic_config__ = STRICT

    job: Job
    algorithm: Choice = Choice(name=DEFAULT_ALGORITHM)
    inner: Choice = Choice(name="none")
    optimizer: Choice = Choice(name="sgd")
    schedule: Schedule = Schedule()
    gradient: Gradients = Gradients()
    parameters: tuple[ParameterGroup, ...] = ()
    compression: Choice = Choice(name="none")
    servers: Servers = Servers()
    workers: Workers = Workers()
    replica: Replica = Replica()
    data: Data = Data()
    limits: Limits = Limits()
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()
    average: Average = Average()
    hosts: tuple[Host, ...] = ()
    slurm: Slurm = Slurm()
    log: Log = Log()
    network: Network = Network()
    timeouts: Timeouts = Timeouts()

    @property
    def ranks(self) -> int:
        """The processes of a worker that have a model."""
        return self.workers.processes * self.replica.ranks * self.replica.hogwild

    @property
    def places(self) -> tuple[Host, ...]:
        """The hosts, or the nodes of Slurm's job."""
        return tuple(Node() for _ in range(self.slurm.nodes)) or self.hosts

    @property
    def has_other_hosts(self) -> bool:
        return any(host.is_other for host in self.places)

    @property
    def uses_tcp(self) -> bool:
        """Unix sockets do not reach other hosts."""
        return self.has_other_hosts or self.network.transport == "tcp"

    @property
    def is_encrypted(self) -> bool:
        return self.uses_tcp and self.network.encryption == "curve"


def to_dict(job: JobFile) -> dict[str, Any]:
    return dataclasses.asdict(job)


T = TypeVar("T")


def from_dict(kind: type[T], values: dict[str, Any]) -> T:
    """Rebuild a dataclass tree from `to_dict`; values were validated when the run was made."""
    hints = get_type_hints(kind)
    return kind(**{key: _built(hints[key], value) for key, value in values.items()})


def _built(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:  # Of as many dataclasses as there are.
        return tuple(_built(get_args(hint)[0], item) for item in value)
    return value
