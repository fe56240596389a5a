"""The job: what a job file says, as frozen dataclasses. Every key is documented under its field.

The text under each field is the manual: `dlctl-job(5)` is generated from it. Limits are in the
types, so that `jobfile/` reports every violation at once, with file and line. Daemons read the
resolved job (`job.json` in the run directory) with `from_dict` and need no validator.

Options of an algorithm, compressor, optimiser or launcher are defined next to their owner.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Len, Lt

from dlctl.util.numeric_limits import PushNorm, WeightDecay

STRICT = {"extra": "forbid", "strict": True}
"""Config for the validator: an unknown key is an error and "4" is not 4."""

MAIN = "__main__"
PARTS_MAX = 8
"""Parts of one push, each of at most four arrays: all have to fit into the frames of one message.
"""
COUNT_MAX = 4096
Count = Annotated[int, Ge(1), Le(COUNT_MAX)]
Seconds = Annotated[float, Gt(0), Le(1e7)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """When the run finishes: at the first of these limits that is reached."""

    __pydantic_config__ = STRICT

    epochs: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Passes over the dataset; 0.5 is half of it. Not with a stream, whose length is unknown."""
    steps: Annotated[int, Ge(1)] | None = None
    """Steps of all workers together."""
    samples: Annotated[int, Ge(1)] | None = None
    """Samples of all workers together."""
    seconds: Seconds | None = None
    """Seconds since the workers were released."""
    target: str | None = None
    """A metric of the task's `evaluate` and a bound: "accuracy >= 0.85". "loss <= 0.1" is about the
    "loss" that `evaluate` returns, not the loss of the training. If `evaluate` does not return that
    metric, `status` and `events` say so, and a run with no other limit fails.
    """

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are reached however the training goes: all but the target."""
        found = {key: getattr(self, key) for key in ("epochs", "steps", "samples", "seconds")}
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    __pydantic_config__ = STRICT

    name: Annotated[str, Len(1, 64)]
    """Letters a-z, digits, dot, underscore, dash; begins with a letter or digit."""
    task: str = ""
    """Where the model, data and loss are: "train.py:task", a path relative to the job file and a
    name in it. The file's folder is the first in which Python searches for modules. A job has
    either this, or `script`, or `module`.
    """
    script: str = ""
    """In place of `task`: a program with a training loop of its own, which calls dlctl.attach(), as
    "train.py"; a path relative to the job file. Every worker runs it, as `python train.py` would:
    its folder is the first in which Python searches for modules, and nothing is seeded. It has its
    own model, optimizer and batches, and does itself what [gradient] says, but for the global clip.
    Not for methods that need more of a replica than that, such as "sandblaster", "hogwild" and
    "rows".
    """
    module: str = ""
    """The same for `python -m module`, as "pkg.train"; it is searched beside the job file."""
    args: tuple[str, ...] = ()
    """The arguments of `script` or `module`: ["--lr", "0.1"]."""
    stop: Stop = Stop(epochs=1)
    """When the run finishes, for example { epochs = 3 } or { target = "accuracy >= 0.85" }."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    """Seeds the model's initial values, the order of the samples, all random numbers that the
    task's file draws during import, and Python's hashes: a set of words has one order in all
    workers."""
    weights: str = ""
    """Initial values instead of those of model(): a .safetensors file, or a directory of them, with
    names as in model().state_dict(). A path is relative to the job file, and on other hosts the
    same full path is used; what is at an address, as "s3://bucket/base.safetensors", is downloaded
    once by each host, with the credentials that its workers find there. A worker without the file
    takes the run's values, but worker-0, and all workers of methods whose replicas initialise their
    own model, need it. "": the values of model()."""
    strict: bool = True
    """Whether all names and shapes of `weights` and of the model have to match. If not, those that
    match are used, and a warning lists the others."""
    run_dir: str = "runs"
    """Where run directories are created, relative to the job file. Only you can enter them (mode
    0700). To let others read checkpoints and logs, chmod the directory of a run: no command changes
    its mode afterwards. The run's key stays yours."""

    @property
    def file(self) -> str:
        """The user's file: of the task, or the program. In a resolved job its full path, of a
        module, too.
        """
        return self.script or self.task.rpartition(":")[0]

    @property
    def search_path(self) -> Path:
        """The folder of a resolved job in which Python searches first for the user's modules."""
        file = Path(self.file)
        is_package = file.stem == MAIN and not self.module.endswith(MAIN)
        above = self.module.count(".") + is_package
        return file.parents[above]

    def with_file(self, file: str) -> Job:
        """The same job with the user's file somewhere else."""
        if self.script:
            return dataclasses.replace(self, script=file)
        _, _, name = self.task.rpartition(":")
        return dataclasses.replace(self, task=f"{file}:{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A name from the registry and that entry's own options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


DEFAULT_ALGORITHM = "downpour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the run, by the samples that all workers have processed. It scales
    every optimiser that takes gradient steps: the replicas' own (`inner`), and the servers' where
    gradients are pushed to it; not an optimiser that takes the steps of whole rounds. A `script`
    applies it itself, by `run.lr_factor`."""

    __pydantic_config__ = STRICT

    kind: Literal["constant", "linear", "cosine", "wsd", "step"] = "constant"
    """What follows the warm-up. "wsd": stable, then a straight decay; "step": times gamma at each
    of decay_at."""
    warmup: str = "0 steps"
    """Linear increase from 0 to the peak: "5%" of the run, "500 steps" or "10_000 samples"; steps
    are those of all workers together."""
    final: Annotated[float, Ge(0), Le(1)] = 0.0
    """Fraction of the peak at the end of the run, for "linear", "cosine" and "wsd"."""
    decay_at: tuple[Annotated[float, Gt(0), Lt(1)], ...] = ()
    """Fractions of the run: where "step" decreases, and where the decay of "wsd" begins (0.9)."""
    gamma: Annotated[float, Gt(0), Le(1)] = 0.1
    """The factor of each decrease of "step"."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the rate scales with the number of workers, for methods that average gradients, as "sync"
    (Goyal 2017): lr is the rate for lr_workers workers; with N workers it is N / lr_workers times
    as much, or the square root of that. After "dlctl scale" it changes linearly over the length of
    the warm-up. If the run begins with another number than lr_workers, its warm-up goes from lr to
    the rate for that number, and not from 0. Workers that die and are replaced change nothing."""
    lr_workers: Annotated[int, Ge(0), Le(COUNT_MAX)] = 0
    """The number of workers that lr is for; 0: workers.count."""
    over: str = ""
    """The assumed length of the run: "50_000 steps" or "1_000_000 samples"; "": from `job.stop`.
    Required if `job.stop` has only seconds or a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """How a replica processes a gradient before it is used."""

    __pydantic_config__ = STRICT

    clip_norm: Annotated[float, Ge(0)] = 0.0
    """Largest Euclidean norm of a gradient: a longer one is scaled down to it, as by
    torch.nn.utils.clip_grad_norm_; 0: no limit."""
    clip: Literal["replica", "global"] = "replica"
    """What is clipped: each replica's own gradient, or the gradient of a server update: with "sync"
    the mean of all, which one process would clip. "global" needs a method that pushes gradients,
    and one server where it does not average them. Several servers combine their parts of the norm
    through the coordinator, one more round trip for every step."""
    accumulate: Annotated[int, Ge(1), Le(65536)] = 1
    """Successive batches of `workers.batch_size` that make one step: the gradient is that of all
    their samples, or of all their tokens, if the task's loss returns their number as a weight."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward pass, by torch.autocast. "fp16" scales the loss, as
    torch.amp.GradScaler does: a step whose gradient overflows is skipped, and is not counted."""
    compile: bool = False
    """torch.compile of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that are trained in another way than the others, or not at all. A parameter
    belongs to the first group with a matching pattern; without any, it is trained as if there were
    no groups.

    Rates and decays are those of every optimiser that takes gradient steps: the replicas' own
    (`inner`), and the servers' where gradients are pushed to it; not of an optimiser that takes the
    steps of whole rounds.
    """

    __pydantic_config__ = STRICT

    match: tuple[str, ...]
    """Names of parameters, as in model().named_parameters(), with * for anything, ? for one
    character and [ab] for one of several: ["*.bias", "*norm*"]. A tied parameter matches by any of
    its names. Every pattern has to match something."""
    weight_decay: WeightDecay | None = None
    """Replaces the optimiser's; 0: none. On the servers, lr times lr_scale times it is at most 1.
    """
    lr_scale: Annotated[float, Ge(0), Le(1e6)] = 1.0
    """Factor on the optimiser's rate, which the schedule and `dlctl set` may change."""
    train: bool = True
    """false: the parameters are frozen. requires_grad is False before the first step, and they are
    in no push and no fetch; buffers beside them, such as a BatchNorm's, are still updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    __pydantic_config__ = STRICT

    count: Annotated[int, Ge(0), Le(256)] = 1
    """Parameter servers; each owns one contiguous shard of every table. 0 only with a method that
    needs no servers, where it is the default. With placement = "workers" the default follows from
    the hosts."""
    placement: Literal["spread", "workers"] = "spread"
    """"spread": servers are on the hosts that ask for them, else evenly on all. "workers": every
    host with workers serves a part of the model beside them, by one server, or by as many as its
    `servers` in [[hosts]]; on this machine alone there is one server for each worker. So no host
    carries the traffic of all: with equal parts and as many workers on each, all links carry the
    same (`dlctl status`). A host that is lost takes its shard along, as that of any lost server:
    see `timeouts.host_s`."""
    weights: tuple[Annotated[float, Gt(0), Le(1e6)], ...] = ()
    """The servers' shares of the model, in proportion, one number for each: [2, 1, 1] gives half of
    it to server-0. (): equal shares. An optimiser of matrices moves the bounds to the next matrix.
    """
    layout: Literal["equal", "bandwidth", "shared-bandwidth"] = "equal"
    """How large the servers' parts of the model are. "equal": all alike. "bandwidth": as the links
    of their hosts allow, so that a round of pushes and fetches of all workers takes as short as
    possible; each of [[hosts]] needs its `bandwidth`, which each direction of its link has.
    "shared-bandwidth": the same if both directions of a link together have that rate, as on a
    wireless one. A server may get nothing. The parts are computed when a run starts, and again when
    it is resumed from a checkpoint; they do not change in between, but for `recut_s`."""
    recut_s: Annotated[float, Ge(0)] = 120.0
    """With a `layout` by bandwidth and the method `target-batch`: the parts follow the bandwidths
    that the pushes show, while the run is under way. At most every so many seconds, and only if a
    round takes 20 % less time then, all servers pause behind a step and save a checkpoint, and each
    continues with another part of it. So nothing is changed where a checkpoint takes half a minute.
    Hosts need no `bandwidth` then: until theirs are measured, the parts are alike. 0: they do not
    change."""
    durability: Literal["process", "none", "disk"] = "process"
    """What an acknowledged push survives. "process": the death of its server at any instant; the
    shard is in mapped memory, twice. "disk": also a power loss; every push is on the disk before it
    is acknowledged, in files of up to about six times the shard. "none": neither; pushes after the
    last checkpoint are lost."""
    state_dir: str = ""
    """Where the servers store their shards, a full path. "": shared memory (/dev/shm) if there is
    room, else the run directory; with durability = "disk" always the run directory."""
    push_norm_max: PushNorm = 1e9
    """A push with a larger Euclidean norm is refused, as is one with a NaN; a worker leaves out a
    single gradient that would produce such a push. With this, and the limits of lr, weight_decay
    and eps, no number of pushes makes a weight or the optimiser's state infinite or NaN. If an
    update does so nevertheless, as with a third-party optimiser, it is never published: its server
    exits, and the run fails with an error."""
    fetch_values: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the parameters that workers fetch. "float16" (11 significant bits) and
    "bfloat16" (8) halve the bytes of all values, for slow links. The servers' own values are
    float32, and later versions compensate for the rounding: on average workers see the servers'
    values. Evaluations, checkpoints and the final model are not rounded. Costs a server 6 bytes per
    parameter, and a pass over the changes of each fetched version. A shard with a value beyond the
    range of the format, 65504 for "float16", sends float32 from then on. The precision of pushes is
    set by the compressor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    __pydantic_config__ = STRICT

    count: Count = 1
    """Model replicas that the job itself starts."""
    min: Annotated[int, Ge(1)] | None = None
    """The run trains while at least so many workers are there, and waits while there are fewer, for
    as long as it takes. Not given: it begins when all `count` workers are ready, and continues with
    those that are left."""
    max: Annotated[int, Ge(1)] | None = None
    """The run takes up to so many workers: those that it starts, and others that join with an
    invitation ("dlctl keys invite", "dlctl join"). More of them wait in line. Not given: `count`,
    so that nobody can join."""
    batch_size: Annotated[int, Ge(1)] | Literal["auto"] = 32
    """Samples of one batch of one worker, at most: the batches of a portion are of equal size, give
    or take one sample. A step is one batch, or several: `gradient.accumulate`.
    "auto": before the first step, worker-0 finds the largest power of two that fits into memory, by
    forward and backward passes of real samples; all workers use it, also when the run is resumed.
    At most 65536 on a GPU, of which a tenth stays free, and 1024 on the CPU, where half of the
    memory stays free and a batch takes at most 5 s; and small enough that an epoch has a portion
    for each worker. `dlctl status` shows it.
    A `script` has batches of its own: there this only says how large a portion is, and steps of the
    schedule."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the replicas compute; "auto" takes a GPU if torch finds one, and spreads the workers
    over all GPUs. A `script` chooses its device: by CUDA_VISIBLE_DEVICES it sees one GPU, and none
    with "cpu", unless that variable is set.
    """
    processes: Annotated[int, Ge(1), Le(256)] = 1
    """Processes of each replica, on one host, with a model each; more than 1 only with a method
    that can use them, or with a `script`: it is started so often, with the environment that
    torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR ...), and calls dlctl.attach(..., group=True) in
    each process, as for DDP or FSDP2. If one dies, all are replaced."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """Torch threads per worker, over all of its processes; 0: the machine's cores divided by its
    workers. For a `script` it is OMP_NUM_THREADS, unless that is set."""
    loader_processes: Annotated[int, Ge(0), Le(256)] = 0
    """Processes of torch's DataLoader per worker; 0: the data is loaded in the worker itself. A
    stream is read by one of them."""
    restarts_max: Annotated[int, Ge(0)] = 8
    """How often in a row a worker is replaced that has died before it started training, or within
    10 s of its start, or that has trained for up to 10 min and exited on its own like its
    predecessor (same exit code, or crash), or whose script has left its training loop without
    having trained. Each restart in a row comes later, by up to 30 s. At the next such death it is
    quarantined: the others continue without it until "dlctl restart". A run that still waits for
    its workers fails.
    """
    nonfinite_steps_max: Annotated[int, Ge(1)] = 20
    """Steps in a row with a NaN or infinite loss or gradient, or a gradient above
    servers.push_norm_max, after which a worker is quarantined: it is not replaced until "dlctl
    restart". Such steps are left out, and nothing of them is pushed. After 10 in a row a replica
    resumes from the servers' parameters, as its own may be ruined.
    """
    refused_pushes_max: Annotated[int, Ge(1)] = 3
    """Refused pushes in a row after which a worker is quarantined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProcesses:
    """How the model of one worker is split over several processes of its host: in one of three
    ways, with a GPU for each process if available. If one process dies, all are replaced. A
    checkpoint does not depend on the split, so a run may be resumed with another one. The method's
    state is in the host's memory; each process owns a part of it, and compresses its part of every
    push. The worker itself, the first process, evaluates alone, with the values of one module at a
    time or, on a GPU, with the whole model; the others are idle meanwhile. Needs a method with
    servers; an inner optimiser steps slices, or with stages whole parameters. With fsdp the buffers
    of the model, as of BatchNorm, are those of the first process.

    Refused: methods without servers, with tables of rows or with their own engine; torch.compile,
    fp16, batch_size = "auto", workers.processes; a parameter with a hook on its gradient, and a
    model that copy.deepcopy cannot copy."""

    __pydantic_config__ = STRICT

    fsdp: Annotated[int, Ge(1), Le(256)] = 1
    """Processes that each own a slice of the parameters, gradients and optimiser states, by FSDP2
    (fully_shard) over the modules in nn.Sequential and nn.ModuleList, and compute a part of every
    batch. A task's `parallelize(model, mesh)` replaces fully_shard. Refused, also with `tensor`:
    inner optimisers that need whole parameters (muon, adafactor, sparseadam, those of other
    packages). A batch has at least as many samples as processes."""
    tensor: Annotated[int, Ge(1), Le(256)] = 1
    """Processes that compute every batch together, by tensor parallelism:
    `task.tensor_plan(model)` states which modules are split, {"blocks.*.hidden": "colwise",
    "blocks.*.out": "rowwise"}; each process has the other modules whole. Alternatively
    `task.parallelize(model, mesh)` does it. A task that has neither is refused, and so is a pattern
    that matches no module."""
    pipeline: Annotated[int, Ge(1), Le(256)] = 1
    """Pipeline stages: the best divisible nn.Sequential or nn.ModuleList is split into stages of
    similar size in bytes; `task.stages(model)` may choose them, with a list of module names for
    each stage. Refused: a loss that calls the modules in another order, one of them twice, or
    without gradients (reentrant checkpointing), or that changes a value between two of them."""
    microbatches: Annotated[int, Ge(0), Le(4096)] = 0
    """Micro-batches of a batch for the stages; 0: twice as many as stages, and at most as many as
    samples."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the micro-batches: "gpipe" computes all forward passes before the first backward
    pass; "1f1b" as few as possible, which stores fewer activations."""

    hogwild: Annotated[int, Ge(1), Le(256)] = 1
    """Processes that step in one model without locks, each with its own batches. For methods that
    push gradients, with `[inner]` SGD, on the CPU."""

    @property
    def ranks(self) -> int:
        """The processes of a replica."""
        return self.fsdp * self.tensor * self.pipeline

    @property
    def pieces(self) -> int:
        """The number of pieces that each batch is split into."""
        if self.pipeline > 1:
            return self.microbatches or 2 * self.pipeline
        return self.fsdp


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    __pydantic_config__ = STRICT

    portion_batches: Annotated[int, Ge(1), Le(100000)] = 8
    """Batches of one portion: the range of samples that a worker leases at a time. With batch sizes
    per host, batches of the largest size."""
    lease_ahead_s: Annotated[float, Ge(0), Le(3600)] = 2.0
    """Seconds of work that a worker leases in advance: for so long it continues while the
    coordinator is unavailable. Towards the end of a run it is less, so that all workers finish
    together.
    """
    shuffle: bool = True
    """A new seeded order of the samples in every epoch; false: the dataset's order. A task with a
    `sampler` or `sample_weights` chooses the samples and their order itself. A stream has its own
    order."""
    clients: Annotated[int, Ge(0), Le(100000)] = 0
    """Clients of federated training that the dataset is partitioned into. Then a portion is one
    client, and a data epoch is a round: the clients that the method draws for it. 0: no clients."""
    partition: Literal["iid", "shards", "dirichlet", "task", "workers"] = "iid"
    """How samples are assigned to `clients`. "iid": at random, equally many for each. "shards": two
    pieces of the samples sorted by label (McMahan 2017). "dirichlet": the clients' shares of each
    label are drawn with `alpha`. "task": by `task.clients(dataset)`, a client number for each
    sample. Labels are the dataset's `targets` or `labels`, else the last element of a sample.
    "workers": data never leaves its worker; client c is trained only by worker c mod
    `workers.count`, which alone calls `task.dataset(c)`; `task.client_sizes()` returns, in every
    worker, the number of samples of each client."""
    alpha: Annotated[float, Gt(0)] = 0.5
    """For "dirichlet": the smaller, the more the clients differ."""
    bad_samples_max: Annotated[int, Ge(0), Le(100000)] = 0
    """Samples of the dataset that may fail to load in an epoch, in all workers together: each is
    named in "dlctl events", and its batch continues without it; a batch without any other samples
    is left out. The worker that reports one more is quarantined, and its reports do not count any
    more; the run fails when another worker reports one too many as well, or if there is no other.
    0: the first one is too many; so it always is with a stream. The coordinator counts them; after
    a restart it counts from 0. An error while a batch is put together is not a failure of a
    sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the traffic of each worker. All of them change live with `dlctl set`."""

    __pydantic_config__ = STRICT

    push: str = "off"
    """Rate at which a worker pushes: "100Mbit/s", "5MB/s" or "off"."""
    fetch: str = "off"
    """Rate at which a worker fetches: "100Mbit/s", "5MB/s" or "off"."""
    push_window: str = "128MB"
    """Bytes of a worker's pushes in flight below which it may begin another push, of any size; at
    most four pushes in any case. Less saves memory and staleness, more keeps a link of high latency
    full. "off": only the number of pushes is limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    __pydantic_config__ = STRICT

    every_s: Annotated[float, Ge(0)] = 60.0
    """Seconds between checkpoints; 0: only when the run stops or finishes."""
    keep: Annotated[int, Ge(1)] = 3
    """Checkpoints to retain; older ones are removed. Checkpoints that a run saves because it has
    failed are counted separately: up to as many of those are retained besides."""
    best: str = ""
    """A metric of the task's `evaluate`, and which direction is better: "val_loss min" or "accuracy
    max". A checkpoint is saved as soon as an evaluation yields a new best value, and the best one
    is retained besides the newest `keep`: "dlctl checkpoint export best" exports its model. It also
    contains the steps made during that evaluation, except at the end of the run. "": none."""
    mirror: str = ""
    """Where copies of the newest `keep` checkpoints, and of the best one, are stored as well, as
    "s3://bucket/prefix", "gs://bucket/prefix" or "file:///mnt/store"; "": nowhere. A process beside
    the coordinator uploads each that is complete, and training never waits for it; while a slow
    store is behind, the newest one is next. If all machines are lost, "dlctl start --from ADDRESS"
    continues. One run writes there, and one that starts from a checkpoint there takes over; with
    {run} in it, as "s3://bucket/{run}", each run has a place of its own. "s3" needs "pip install
    'dlctl[s3]'", "gs" 'dlctl[gs]'. Credentials are those of the AWS or Google tools
    (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL; GOOGLE_APPLICATION_CREDENTIALS), of the
    environment of "dlctl start", and never part of the address. See dlctl-storage(7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    __pydantic_config__ = STRICT

    every_epochs: Annotated[float, Ge(0)] = 1.0
    """Epochs between evaluations by worker-0; 0: only at the end. With a stream, passes over it."""
    every_steps: Annotated[int, Ge(0)] = 0
    """Steps of all workers together between evaluations, instead of epochs; 0: by every_epochs."""
    finish_s: Seconds = 60.0
    """Time limit of the task's `finish(model, metrics)`, if it has one, including the fetch of the
    model. It runs once, on one worker, when the run has finished: after the last evaluation and the
    last checkpoint, with that model in eval mode. Its output is in the worker's log; `dlctl run`
    shows that and the text that it returns at the end. If it raises an error, exceeds the limit, or
    its worker dies, that is only a warning and the run is finished nevertheless; if its worker
    dies, it is retried once on another one, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """An exponential moving average of the parameters, maintained by the servers."""

    __pydantic_config__ = STRICT

    ema: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Decay of the average per server update, as 0.999; 0: no average. It is initialised with the
    initial parameters, and is in checkpoints: "dlctl checkpoint export --average" exports its
    model. Costs a server 4 bytes per parameter and one more pass over an update. With compressed
    pushes it costs more: each is applied, and fetched, as a dense one, with zeros for the missing
    elements; an optimiser with momentum then moves these elements, too."""
    evaluate: bool = False
    """Whether the task's `evaluate` and `finish`, and with them job.stop.target and
    checkpoints.best, use the average instead of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Where the metrics of the run are written besides its own database, from which `dlctl status`,
    `top`, `report` and `plot` read. The coordinator writes them: one run, however many workers."""

    __pydantic_config__ = STRICT

    tensorboard: bool = False
    """Whether to write event files for TensorBoard, into the directory `tensorboard` of the run:
    loss, further metrics of the task's loss, evaluations, rates, staleness, bytes. View all runs
    with "tensorboard --logdir runs". Needs "pip install 'dlctl[tensorboard]'"."""
    prometheus_port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port at which the run's metrics are exported for Prometheus, at /metrics; 0: none. Needs "pip
    install 'dlctl[prometheus]'". If the port is taken, training continues with a warning, and the
    coordinator retries."""
    prometheus_address: Annotated[str, Len(1, 255)] = "127.0.0.1"
    """Address of this machine for that port. The metrics are neither encrypted nor protected: any
    process that can connect to the address can read them; with the default only those on this
    machine."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Whether to log to Weights & Biases, through its own package: "online", as the user that
    WANDB_API_KEY or "wandb login" names; "offline": into the directory `wandb` of the run, from
    which "wandb sync" uploads it. The project is WANDB_PROJECT, else the name of the job. Needs
    "pip install 'dlctl[wandb]'"."""
    mlflow: str = ""
    """Address of an MLflow tracking server or store, as "http://mlflow:5000",
    "sqlite:///mlflow.db" or "file:mlruns" (paths are relative to the job file); "": none. It has no
    password: "env:NAME" takes the address from an environment variable of `dlctl start`, and for
    http MLFLOW_TRACKING_USERNAME, _PASSWORD and _TOKEN count. The experiment is
    MLFLOW_EXPERIMENT_NAME, else the name of the job. Needs "pip install 'dlctl[mlflow]'"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    __pydantic_config__ = STRICT

    transport: Literal["ipc", "tcp"] = "ipc"
    """"ipc": unix sockets in a directory that only this user can enter. "tcp": ports on 127.0.0.1;
    with other hosts always "tcp", on addresses that these can reach."""
    encryption: Literal["curve", "none"] = "curve"
    """With "tcp": "curve" encrypts every connection, with a key for every daemon, and accepts only
    these keys. "none" is faster, and open to every user of this machine.
    """
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """With "tcp": the coordinator's port. Servers take the ports after it, followed by the workers
    if the method connects replicas to each other; 0: any free ports."""
    private: bool = False
    """With hosts: declares that everyone in their network may read and change all of this run.
    `allreduce`, as `kfac`, sends from host to host through torch.distributed, neither encrypted nor
    authenticated, and is refused without this."""
    address: str = ""
    """The address at which other hosts, and workers that join (`workers.max`), reach this machine.
    "": with hosts the one from which it reaches them, else 127.0.0.1: then only workers on this
    machine can join."""
    bind: str = ""
    """The address at which this machine listens for workers that join, if it is not `address`:
    behind NAT or port forwarding. `port` and the ports after it, one for each server, must be
    forwarded as they are."""


CLIENT, HEAD = "client", "head"
HOME = "local"
"""The host of a party that is this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A party of split learning (`[algorithm] name = "split"`): who owns a part of the model. Each
    runs its own task file on its own host; its worker has a key of its own, as every daemon has,
    and only that opens the server of its side. The data and the labels of a client are read by its
    own task alone. The parties say how many workers and servers there are."""

    __pydantic_config__ = STRICT

    name: Annotated[str, Len(1, 64)]
    """How messages call it; no two parties share a name."""
    role: Literal["client", "head"]
    """"client": has the data, and the layers up to the cut. "head": the layers behind it; one party
    has this role."""
    task: str
    """Its task, as `job.task`: "train.py:task", relative to the job file."""
    host: str
    """Where its worker and the server of its parameters run: the `ssh` of one of [[hosts]], or
    "local", this machine. Checkpoints, with the parameters of all parties, are stored on this
    machine: so it has to be a client's, unless all parties are here. The servers' values of all
    clients are on the host of the first one."""
    workers: Annotated[int, Ge(1), Le(256)] = 1
    """Of a client: how many workers share its data."""
    weights: str = ""
    """Initial values of its part of the model, as `job.weights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine that takes part; without any, all daemons run on this one."""

    __pydantic_config__ = STRICT

    ssh: str = ""
    """What "ssh NAME" takes, an alias of your ssh configuration included. "": this machine."""
    data: str = ""
    """Address at which the other hosts reach the daemons of this one, if it is not the one that ssh
    connects to; often another network interface.
    """
    bind: str = ""
    """Address at which its daemons listen, if it is not `data`: behind port forwarding, for
    example."""
    servers: Annotated[int, Ge(0), Le(256)] | None = None
    """Parameter servers on this host; default: an even share of those not assigned to a host. See
    also `servers.placement`."""
    workers: Annotated[int, Ge(0), Le(COUNT_MAX)] | None = None
    """Workers on this host; likewise. 0: none, and none are added as long as there is another
    host."""
    batch_size: Annotated[int, Ge(1)] | None = None
    """Samples of one batch of each worker on this host; default: `workers.batch_size`. A batch is
    weighted by its samples. Where the job file converts steps to samples, as in [schedule], a step
    has the mean batch size over all workers; `job.stop` counts the actual steps."""
    bandwidth: str = ""
    """The rate of this host's link, as "100Mbit/s" or "5MB/s"; for `servers.layout`."""
    python: str = ""
    """The Python on this host that has dlctl and torch; "": at the same path as on the
    coordinator's machine."""
    dir: str = ""
    """Where dlctl stores its files on this host, a full path; "": ~/.local/state/dlctl/hosts."""

    @property
    def name(self) -> str:
        """The host's name in the job file; "": this machine."""
        return self.ssh

    @property
    def is_other(self) -> bool:
        """Whether the host has an agent of its own, with files of its own."""
        return bool(self.ssh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated(Host):
    """A host that the launcher brings: the job file does not list it."""

    name: str = ""
    """"": not known before its agent registers."""

    @property
    def is_other(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The launcher of all agents but that of the coordinator's machine, which is always local."""

    name: str = "local"
    options: dict[str, Any] = field(default_factory=dict)
    places: tuple[Allocated, ...] = ()
    """The hosts that it brings, in the order of their agents; (): it takes those of [[hosts]]. They
    follow from the options, and are here because daemons do not load the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every wait is limited: these are the limits, in seconds."""

    __pydantic_config__ = STRICT

    ready_s: Seconds = 300.0
    """From start until all daemons are ready, the user's imports and model() included."""
    silent_s: Seconds = 15.0
    """Without a heartbeat of a daemon; then it is replaced."""
    host_s: Seconds = 120.0
    """Without a heartbeat of a host; then it is given up, and its workers are started on the other
    hosts. If it had servers, the run fails; `dlctl recover` continues it once the host is back, and
    without the host resumes from the newest checkpoint.
    """
    resend_s: Seconds = 1.0
    """Without an acknowledgement of a push or fetch; then it is resent. Doubles up to 4 times."""
    grace_s: Seconds = 30.0
    """For a stopping worker to finish its step and its last pushes."""
    script_s: Seconds = 120.0
    """For a `script` to end when the run is over: to save, or to upload. Then it is killed."""
    mirror_s: Seconds = 300.0
    """At the end of a run, for the upload of its last checkpoint to `checkpoints.mirror`. After
    that it stays on this machine, and `status` says so."""


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
    replica: ReplicaProcesses = ReplicaProcesses()
    data: Data = Data()
    limits: Limits = Limits()
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()
    average: Average = Average()
    hosts: tuple[Host, ...] = ()
    parties: tuple[Party, ...] = ()
    launcher: Launch = Launch()
    log: Log = Log()
    network: Network = Network()
    timeouts: Timeouts = Timeouts()

    @property
    def takes_guests(self) -> bool:
        """Whether workers may join from elsewhere."""
        return (self.workers.max or 0) > self.workers.count

    @property
    def has_loop(self) -> bool:
        """Whether the workers run a program with a training loop of its own."""
        return bool(self.job.script or self.job.module)

    @property
    def ranks(self) -> int:
        """The processes of a worker that have a model."""
        return self.workers.processes * self.replica.ranks * self.replica.hogwild

    @property
    def places(self) -> tuple[Host, ...]:
        """The hosts of the job file, or those that the launcher brings."""
        return self.launcher.places or self.hosts

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


def of_stored(values: dict[str, Any]) -> JobFile:
    """The job of a run directory, as `to_dict` or an earlier version has written it."""
    return from_dict(JobFile, current(values))


def current(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored job in today's form. Earlier versions had no `launcher`: it followed from the hosts,
    or from the number of nodes that were requested from Slurm.
    """
    if "launcher" in stored:
        return stored
    rest = dict(stored)
    asked, hosts = rest.pop("slurm", {}), rest.get("hosts", ())
    name = "ssh" if any(host.get("ssh") for host in hosts) else "local"
    launcher: dict[str, Any] = {"name": name, "options": {}, "places": []}
    if nodes := asked.get("nodes", 0):
        places = [dataclasses.asdict(Allocated()) for _ in range(nodes)]
        launcher = {"name": "slurm", "options": asked, "places": places}
    return {**rest, "launcher": launcher}


T = TypeVar("T")


def from_dict(kind: type[T], values: dict[str, Any]) -> T:
    """Rebuild a dataclass tree from `to_dict`; values were validated when the run was made."""
    hints = get_type_hints(kind)
    return kind(**{key: _built(hints[key], value) for key, value in values.items()})


def _built(hint: Any, value: Any) -> Any:
    if isinstance(value, dict) and get_origin(hint) in (Union, UnionType):  # Or None.
        hint = next((each for each in get_args(hint) if dataclasses.is_dataclass(each)), hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:  # A tuple of any number of dataclasses.
        return tuple(_built(get_args(hint)[0], item) for item in value)
    return value
