"""THE list of names that a job file can use: kind -> name -> where it is and what it is.

Adding a method, compressor, server optimiser or launcher is one file and one line here. Entries are
strings, imported on first use, so that this module costs nothing. Third parties add theirs through
the entry-point groups `dlctl.algorithms`, `dlctl.compressors`, `dlctl.optimizers`,
`dlctl.inner_optimizers`, `dlctl.launchers`, `dlctl.stores`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlctl import outdated
from dlctl.errors import UsageError
from dlctl.util.did_you_mean import did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, slots=True)
class Component:
    target: str
    """"module:attribute"."""
    summary: str
    note: str = ""
    """A caveat, as a sentence without its full stop."""
    origin: str = ""
    """The package that it is from, with its version; "": dlctl."""

    def load(self) -> Any:
        """Import the component. Raises ImportError and AttributeError, and for another package
        ImportError only, which names the package whatever goes wrong in it.
        """
        if not self.origin:
            return attribute(self.target)
        with self.named_errors():
            return attribute(self.target)

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Whatever goes wrong is an ImportError that names the package."""
        try:
            yield
        except outdated.Outdated:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ImportError(f"{self.origin}: importing {self.target}: {what}") from error


BUILT_IN: dict[str, dict[str, Component]] = {
    "algorithms": {
        "downpour": Component(
            "dlctl.algorithms.methods.downpour:DOWNPOUR", "asynchronous SGD (Dean 2012)"
        ),
        "sync": Component(
            "dlctl.algorithms.methods.sync:SYNC",
            "a barrier in the servers, averaged by samples; backup workers (Chen 2016)",
        ),
        "target-batch": Component(
            "dlctl.algorithms.methods.target_batch:TARGET_BATCH",
            "a step per so many samples, of whoever takes part (DeDLOC, Diskin 2021)",
        ),
        "dgc": Component(
            "dlctl.algorithms.methods.dgc:DGC",
            "sync with momentum in the replicas and 0.1 % of it sent (Lin 2018)",
        ),
        "demo": Component(
            "dlctl.algorithms.methods.demo:DEMO",
            "sync along the sign of the largest frequencies of the replicas' momenta (Peng 2024)",
        ),
        "local-sgd": Component(
            "dlctl.algorithms.methods.local_sgd:LOCAL_SGD",
            "replicas step alone, and continue from their mean (Stich 2019)",
        ),
        "diloco": Component(
            "dlctl.algorithms.methods.local_sgd:DILOCO",
            "AdamW in the replicas, Nesterov on the mean of their updates (Douillard 2023)",
        ),
        "isoloco": Component(
            "dlctl.algorithms.methods.isoloco:ISOLOCO",
            "DiLoCo whose outer steps are equally long in all directions of a matrix (2026)",
        ),
        "async-diloco": Component(
            "dlctl.algorithms.methods.async_diloco:ASYNC_DILOCO",
            "DiLoCo without waiting: delayed momentum, steps by speed (Liu 2024)",
        ),
        "streaming-diloco": Component(
            "dlctl.algorithms.methods.streaming_diloco:STREAMING_DILOCO",
            "DiLoCo by fragments, each while the others are trained (Douillard 2025)",
        ),
        "decoupled-diloco": Component(
            "dlctl.algorithms.methods.decoupled_diloco:DECOUPLED_DILOCO",
            "the same with a quorum, which does not wait for stragglers (Douillard 2026)",
        ),
        "loscar": Component(
            "dlctl.algorithms.methods.loscar:LOSCAR",
            "local SGD that averages a random part each round (2026)",
        ),
        "sparseloco": Component(
            "dlctl.algorithms.methods.sparseloco:SPARSELOCO",
            "DiLoCo whose replicas send 1.6 % of their updates, in 2 bits (Sarfi 2025)",
        ),
        "easgd": Component(
            "dlctl.algorithms.methods.easgd:EASGD",
            "replicas and a centre pull each other nearer (Zhang 2015)",
        ),
        "eamsgd": Component(
            "dlctl.algorithms.methods.easgd:EAMSGD",
            "the same with Nesterov's momentum in the replicas",
        ),
        "easgd-atomic": Component(
            "dlctl.algorithms.methods.easgd_atomic:EASGD_ATOMIC",
            "easgd in one round trip: the servers compute the pull",
        ),
        "fedavg": Component(
            "dlctl.algorithms.methods.fedavg:FEDAVG",
            "clients with their own data, some per round (McMahan 2017); FedProx, privacy",
        ),
        "fedbuff": Component(
            "dlctl.algorithms.methods.fedbuff:FEDBUFF",
            "local-sgd without a barrier, its updates buffered in the servers (Nguyen 2022)",
        ),
        "ssp": Component(
            "dlctl.algorithms.methods.ssp:SSP", "bounded distance to the slowest replica (Ho 2013)"
        ),
        "softsync": Component(
            "dlctl.algorithms.methods.softsync:SOFTSYNC",
            "an update per n-th part of all gradients, stale ones with a lower rate (Zhang 2016)",
        ),
        "dc-asgd": Component(
            "dlctl.algorithms.methods.dc_asgd:DC_ASGD",
            "gradients are corrected for their age (Zheng 2017)",
        ),
        "ringmaster": Component(
            "dlctl.algorithms.methods.ringmaster:RINGMASTER",
            "stale gradients are dropped (Maranjyan 2025)",
        ),
        "ringmaster-lmo": Component(
            "dlctl.algorithms.methods.ringmaster_lmo:RINGMASTER_LMO",
            "ringmaster with steps along orthogonal matrices (Maranjyan 2026)",
        ),
        "ringleader": Component(
            "dlctl.algorithms.methods.ringleader:RINGLEADER",
            "all workers have equal weights, however fast they are (Maranjyan 2026)",
        ),
        "epoch-cut": Component(
            "dlctl.algorithms.methods.epoch_cut:EPOCH_CUT",
            "Downpour that does not wait for stragglers at an epoch's end (Chilimbi 2014)",
        ),
        "allreduce": Component(
            "dlctl.algorithms.methods.allreduce:ALLREDUCE",
            "synchronous SGD without servers: all replicas sum their gradients (Goyal 2017)",
        ),
        "kfac": Component(
            "dlctl.algorithms.methods.kfac:KFAC",
            "allreduce along the natural gradient, by factors per layer (Pauloski 2020)",
        ),
        "gossip": Component(
            "dlctl.algorithms.methods.gossip:GOSSIP",
            "no servers: replicas average with random others, without waiting (Jin 2016)",
        ),
        "noloco": Component(
            "dlctl.algorithms.methods.noloco:NOLOCO",
            "DiLoCo's outer steps with one random replica instead of all (Kolehmainen 2025)",
        ),
        "hogwild": Component(
            "dlctl.algorithms.methods.hogwild:HOGWILD",
            "no servers: the workers of a host step in one model without locks (Niu 2011)",
        ),
        "split": Component(
            "dlctl.algorithms.methods.split:SPLIT",
            "a model divided among parties with their own data; NoPeek (Gupta 2018)",
        ),
        "rows": Component(
            "dlctl.algorithms.methods.rows:ROWS",
            "embeddings that only the servers hold: workers fetch a batch's rows, push changes",
        ),
        "sandblaster": Component(
            "dlctl.algorithms.methods.sandblaster:SANDBLASTER",
            "L-BFGS on the shards, a batch is the whole dataset (Dean 2012)",
        ),
    },
    "compressors": {
        "none": Component("dlctl.compress.none:Dense", "every entry, in 32 or 16 bits"),
        "fp16": Component(
            "dlctl.compress.halves:Float16", "every entry as float16, error feedback"
        ),
        "bf16": Component(
            "dlctl.compress.halves:BFloat16", "every entry as bfloat16, error feedback"
        ),
        "topk": Component(
            "dlctl.compress.topk:TopK", "the k largest entries, exact, error feedback"
        ),
        "topk-sampled": Component(
            "dlctl.compress.sampled:SampledTopK",
            "the k largest by a sampled threshold, many times faster (Lin 2018)",
        ),
        "gaussian": Component(
            "dlctl.compress.gaussian:Gaussian",
            "about the k largest, threshold of a normal distribution, bisected (Shi 2019)",
        ),
        "gaussian-ref": Component(
            "dlctl.compress.gaussian_ref:GaussianRef",
            "GaussianK as its authors published it, to compare with",
            'it can send far more or less than k, or nothing at all; use "gaussian" to train',
        ),
        "e3m0": Component(
            "dlctl.compress.e3m0:E3M0",
            "4 bits per entry: a sign and a power of two (Douillard 2025)",
        ),
        "topk-chunked": Component(
            "dlctl.compress.chunked:ChunkedTopK",
            "the k largest of every chunk, in 2 bits each (SparseLoCo, Sarfi 2025)",
        ),
        "dct": Component(
            "dlctl.compress.dct:DCT",
            "the largest cosine coefficients of blocks of 64 x 64 (DeMo, Peng 2024)",
        ),
        "randomk": Component(
            "dlctl.compress.randomk:RandomK", "k random entries; their places need no bytes"
        ),
        "onebit": Component("dlctl.compress.onebit:OneBit", "signs and block means (Seide 2014)"),
        "int8": Component("dlctl.compress.int8:Int8", "8 bits per entry and a scale per block"),
        "powersgd": Component(
            "dlctl.compress.powersgd:PowerSGD", "a matrix of low rank (Vogels 2019)"
        ),
    },
    "optimizers": {
        "sgd": Component("dlctl.optim.sgd:SGD", "w -= lr * g"),
        "momentum": Component("dlctl.optim.momentum:Momentum", "heavy ball or Nesterov"),
        "delayed-nesterov": Component(
            "dlctl.optim.delayed_nesterov:DelayedNesterov",
            "Nesterov for pushes that arrive one by one (Liu 2024)",
        ),
        "adagrad": Component("dlctl.optim.adagrad:Adagrad", "per-element rates (Duchi 2011)"),
        "adam": Component("dlctl.optim.adam:Adam", "first and second moments (Kingma 2015)"),
        "adamw": Component(
            "dlctl.optim.adam:AdamW", "Adam with decoupled weight decay (Loshchilov 2019)"
        ),
        "lion": Component("dlctl.optim.lion:Lion", "sign of an interpolated momentum (Chen 2023)"),
        "rmsprop": Component(
            "dlctl.optim.rmsprop:RMSprop", "root of a running mean square (Hinton 2012)"
        ),
        "muon": Component(
            "dlctl.optim.muon:Muon", "matrices along orthogonal ones, AdamW else (Jordan 2024)"
        ),
        "soap": Component("dlctl.optim.soap:Soap", "Adam in the eigenbasis of Shampoo (Vyas 2025)"),
        "shampoo": Component(
            "dlctl.optim.shampoo:Shampoo", "a preconditioner per side of a matrix (Gupta 2018)"
        ),
        "lmo": Component(
            "dlctl.optim.lmo:Lmo", "matrices along orthogonal ones, momentum else (Maranjyan 2026)"
        ),
        "isotropic": Component(
            "dlctl.optim.isotropic:Isotropic",
            "Nesterov on matrices with equal singular values (IsoLoCo)",
        ),
        "yogi": Component(
            "dlctl.optim.yogi:Yogi", "Adam, its second moment additive (Zaheer 2018)"
        ),
    },
    "inner_optimizers": {
        "none": Component("dlctl.job.inner:NO_STEPS", "no steps of its own"),
        "script": Component("dlctl.job.inner:SCRIPT", "that of the script of [job]"),
        "sgd": Component("dlctl.job.inner:SGD", "torch.optim.SGD"),
        "adam": Component("dlctl.job.inner:ADAM", "torch.optim.Adam"),
        "adamw": Component("dlctl.job.inner:ADAMW", "torch.optim.AdamW"),
        "muon": Component(
            "dlctl.job.inner:MUON", "torch.optim.Muon for matrices, AdamW for the rest"
        ),
        "nadam": Component("dlctl.job.inner:NADAM", "torch.optim.NAdam"),
        "radam": Component("dlctl.job.inner:RADAM", "torch.optim.RAdam"),
        "adamax": Component("dlctl.job.inner:ADAMAX", "torch.optim.Adamax"),
        "adagrad": Component("dlctl.job.inner:ADAGRAD", "torch.optim.Adagrad"),
        "adadelta": Component("dlctl.job.inner:ADADELTA", "torch.optim.Adadelta"),
        "adafactor": Component("dlctl.job.inner:ADAFACTOR", "torch.optim.Adafactor"),
        "rmsprop": Component("dlctl.job.inner:RMSPROP", "torch.optim.RMSprop"),
        "rprop": Component("dlctl.job.inner:RPROP", "torch.optim.Rprop"),
        "asgd": Component("dlctl.job.inner:ASGD", "torch.optim.ASGD"),
        "sparseadam": Component("dlctl.job.inner:SPARSEADAM", "torch.optim.SparseAdam"),
    },
    "launchers": {
        "local": Component("dlctl.launch.local:Local", "processes on this machine"),
        "ssh": Component("dlctl.launch.ssh:Ssh", "agents on other machines, started over ssh"),
        "slurm": Component("dlctl.launch.slurm:Slurm", "agents on the nodes of a Slurm job"),
    },
    "stores": {
        "s3": Component("dlctl.stores.s3:opened", "Amazon S3, and all that speak its protocol"),
        "gs": Component("dlctl.stores.gs:opened", "Google Cloud Storage"),
        "file": Component("dlctl.stores.folder:opened", "a directory, as of a file server"),
    },
}

SECTIONS = {
    "algorithm": "algorithms",
    "inner": "inner_optimizers",
    "optimizer": "optimizers",
    "compression": "compressors",
}
"""Section of the job file -> kind of the registry that its `name` is looked up in; these may have
live settings. The section [launcher] has `launchers`; addresses begin with one of `stores`.
"""
BY_PATH = {"inner_optimizers": Component("dlctl.job.inner:FOREIGN", "a class of yours")}
"""Kinds whose names may be "package.module:Class", and what such an entry is."""
BASES = {"compressors": "dlctl.compress.base.Compressor"}
"""Kinds whose components are classes -> the base of all of them."""
ALIASES: dict[str, str] = {
    # algorithms
    "all-reduce": "allreduce", "asgd": "downpour", "async": "downpour", "async-sgd": "downpour",
    "asynchronous": "downpour", "bsp": "sync", "ddp": "allreduce", "horovod": "allreduce",
    "fedadam": "fedavg", "fedprox": "fedavg", "fedyogi": "fedavg",
    "localsgd": "local-sgd", "post-local-sgd": "local-sgd", "synchronous": "sync",
    # compressors
    "1-bit": "onebit", "1bit": "onebit", "bfloat16": "bf16", "dense": "none",
    "dgc": "topk-sampled", "float16": "fp16", "gaussiank": "gaussian", "qsgd": "int8",
    "quantize": "int8", "signsgd": "onebit",
    # optimisers
    "nesterov": "momentum",
    # schemes
    "gcs": "gs", "s3a": "s3", "s3n": "s3",
    # keys and their values
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "gpu": "cuda", "half": "float16",
    "learning-rate": "lr",
}  # fmt: skip
"""Names in other programs and papers -> names here. 16 bits have different names as a compressor
and as a value: each is an alias of the other where the other is known."""


def attribute(target: str) -> Any:
    """Import "module:attribute". Raises ImportError or AttributeError."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def names(kind: str) -> list[str]:
    """All names of one kind: built in first, then third parties'."""
    return [*BUILT_IN[kind], *(n for n in sorted(_third_party(kind)) if n not in BUILT_IN[kind])]


def find(kind: str, name: str) -> Component:
    """The entry of a name. Entry points are scanned only when the name is not built in.

    Raises UsageError with a suggestion for an unknown name.
    """
    entry = BUILT_IN[kind].get(name) or _by_path(kind, name) or _third_party(kind).get(name)
    if entry is None:
        raise UsageError(
            f'unknown {singular(kind)} "{name}"; {did_you_mean(name, names(kind), ALIASES)}'
        )
    return entry


def is_known(kind: str, name: str) -> bool:
    return _by_path(kind, name) is not None or name in names(kind)


def singular(kind: str) -> str:
    """What one of this kind is called in errors: "inner optimizer"."""
    return kind[:-1].replace("_", " ")


def _by_path(kind: str, name: str) -> Component | None:
    return BY_PATH.get(kind) if ":" in name else None


def load(kind: str, name: str) -> Any:
    """Load a component by its kind and name. Raises ImportError or AttributeError if one from
    elsewhere cannot be loaded.
    """
    entry = find(kind, name)
    if name in BUILT_IN[kind] or name not in _third_party(kind):
        return entry.load()
    what = f'{singular(kind)} "{name}" {entry.summary}'
    with entry.named_errors():
        return outdated.checked(lambda: attribute(entry.target), what, BASES.get(kind, ""))


@cache
def _third_party(kind: str) -> dict[str, Component]:
    from importlib.metadata import entry_points

    found = entry_points(group=f"dlctl.{kind}")
    origins = {point.name: _origin(point) for point in found}
    return {
        point.name: Component(
            point.value, f"from {origins[point.name]}", origin=origins[point.name]
        )
        for point in found
    }


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "elsewhere"
