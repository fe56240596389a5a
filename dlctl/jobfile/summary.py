"""A job in one line: method, optimisers, daemons, stop condition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl.job.inner import NONE, OF_SCRIPT
from dlctl.util.text import escape

if TYPE_CHECKING:
    from dlctl.job.config import Choice, JobFile, ReplicaProcesses, Servers, Stop


def of(job: JobFile) -> str:
    """A job in one line."""
    from dlctl import registry

    method = registry.load("algorithms", job.algorithm.name)
    rule = [_rated(job.optimizer)] if method.shard is not None else []
    return ", ".join(
        [
            job.job.name,
            job.algorithm.name,
            *filter(None, [_inner(job.inner)]),
            *([*rule, _compression(job.compression)] if job.servers.count else []),
            _servers(job.servers) if job.servers.count else "no servers",
            _count(job.workers.count, "worker") + _cut(job.replica),
            *_where(job),
            _stop(job.job.stop, ends=method.is_driven) + _work(job),
        ]
    )


def _servers(servers: Servers) -> str:
    """As in "3 servers beside the workers (2 : 1 : 1 of the model)"."""
    where = " beside the workers" if servers.placement == "workers" else ""
    parts = " : ".join(f"{weight:g}" for weight in servers.weights)
    return _count(servers.count, "server") + where + (f" ({parts} of the model)" if parts else "")


def _where(job: JobFile) -> list[str]:
    """The hosts that the launcher brings, as in "on 3 nodes"."""
    from dlctl.launch import launcher

    count = len(job.launcher.places)
    return [f"on {_count(count, launcher.of(job).noun)}"] if count else []


def _rated(optimizer: Choice) -> str:
    lr = optimizer.options.get("lr")
    return optimizer.name if lr is None else f"{optimizer.name}(lr={lr})"


def _inner(optimizer: Choice) -> str:
    """As in "adamw(lr=0.001) in each worker"; "" if the replicas make no steps of their own."""
    if optimizer.name == NONE:
        return ""
    return f"{_rated(optimizer)} in each worker" if optimizer.name != OF_SCRIPT else "own optimizer"


def _work(job: JobFile) -> str:
    """A length in steps or samples as updates, as in " (80 updates)". A step is one worker's."""
    from dlctl import registry
    from dlctl.job import batches

    stop = job.job.stop
    method = registry.load("algorithms", job.algorithm.name)
    is_open = not (stop.samples or stop.steps) or batches.is_open(job)
    if is_open or job.data.clients or method.shard is None or not method.shard.takes_pushes:
        return ""
    step = batches.mean(job)
    lengths = [stop.samples / step] if stop.samples else []
    lengths += [stop.steps] if stop.steps else []
    kind = method.push_kind(method.Options(**job.algorithm.options))
    if kind.target:
        return f" (about {_count(round(min(lengths) * step / kind.target), 'update')})"
    push = kind.batches
    if method.shard.averages:
        # Some methods make updates without all workers, with fewer samples.
        least = "at least " if method.lead.chooses else ""
        return f" ({least}{_count(round(min(lengths) / push / job.workers.count), 'update')})"
    return f" ({_count(round(min(lengths) / push), 'push', 'pushes')})"


def _cut(replica: ReplicaProcesses) -> str:
    """How a replica is cut: " of 2 processes (fsdp)"; "" if a worker is one process."""
    ways = [way for way in ("fsdp", "tensor", "pipeline", "hogwild") if getattr(replica, way) > 1]
    return f" of {replica.ranks * replica.hogwild} processes ({', '.join(ways)})" if ways else ""


def _compression(choice: Choice) -> str:
    density = choice.options.get("density")
    if choice.name == "none":
        return "no compression"
    return choice.name if density is None else f"{choice.name}(density={density})"


def _count(number: float, what: str, many: str = "") -> str:
    return f"{number:.10g} {what}" if number == 1 else f"{number:.10g} {many or what + 's'}"


def _stop(stop: Stop, *, ends: bool) -> str:
    """ends: the method ends on its own, and only `seconds` limits it."""
    units = ("second",) if ends else ("epoch", "step", "sample", "second")
    limits = ["it is done"] if ends else []
    limits += [
        _count(value, unit) for unit in units if (value := getattr(stop, f"{unit}s")) is not None
    ]
    limits += [escape(stop.target)] if stop.target else []
    return f"until {' or '.join(limits)}" if limits else "until it is stopped"
