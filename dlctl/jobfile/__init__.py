"""The reader of job files: TOML in, a checked and resolved `config.JobFile` out.

    reading.py    bytes -> document       faults of the file itself
    positions.py  text -> key -> place    the position of every key
    schema.py     document -> dataclasses unknown keys, types, ranges
    checks.py     checks beyond types     names, rates, targets, files, cross checks
    programs.py   what workers run        task, script or module, and what goes with each
    hosts.py      checks of [[hosts]]     names, addresses, daemons on each
    launchers.py  [launcher]              its older forms, options, abilities, hosts
    stores.py     [log] mlflow            the address of a store
    faults.py     faults -> JobFileError  all of them at once, each with its line
    replicas.py   checks of [replica]     conflicts
    shares.py     checks of [servers]     servers beside workers, their shares of the model
    parties.py    checks of [[parties]]   and what follows from them
    no_effect.py  warnings                valid settings without an effect

Nothing of the job is imported or started here, and torch is not needed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlctl import registry
from dlctl.errors import UsageError
from dlctl.job import batches, inner, placement, schedule, shard_weights
from dlctl.job.config import COUNT_MAX, DEFAULT_ALGORITHM, Choice, JobFile
from dlctl.jobfile import (
    checks,
    launchers,
    parties,
    programs,
    reading,
    replicas,
    schema,
    shares,
    stores,
)
from dlctl.jobfile.faults import Fault as Fault
from dlctl.jobfile.faults import JobFileError as JobFileError
from dlctl.jobfile.faults import JobFileProblem as JobFileProblem
from dlctl.jobfile.faults import locate
from dlctl.jobfile.no_effect import warnings as warnings
from dlctl.jobfile.positions import KeyPath, find_keys, get
from dlctl.launch.launcher import load as load_launcher
from dlctl.model import parameter_groups
from dlctl.util import bounds, numeric_limits
from dlctl.util.did_you_mean import did_you_mean
from dlctl.util.numeric_limits import LocalRate

LOCAL_STEPS = "local_steps"
"""The option of methods whose replicas make steps of their own from 2 on."""


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> JobFile:
    """Read, check and resolve a job file.

    overrides: dotted keys and values that win over the file: {"workers.count": 8}; None removes a
    key or a table. The options of
    algorithm, optimizer and compression are complete, with their defaults, so that
    `Options(**job.algorithm.options)` needs no check.

    Raises JobFileError with everything that is wrong, or UsageError for an override that has no
    place.
    """
    text = reading.read(path)
    document = reading.parse(path, text)
    _override(document, overrides or {})
    faults = reading.remove_foreign(document)
    form = launchers.translate(document)
    faults += parties.translate(document)
    faults += [*form.faults, *checks.check(document, path.parent)]
    resolved: dict[str, Choice] = {}
    for section, kind in registry.SECTIONS.items():
        found, more = _resolve(section, kind, document.get(section))
        faults += more
        if found:
            resolved[section] = found
    launcher, more = _resolve("launcher", "launchers", document["launcher"])
    faults += [*more, *launchers.check(launcher, document)]
    faults += _check_decay(resolved)
    with_method = [*_check_exact_pushes(resolved), *_check_exact_fetches(resolved, document)]
    with_method += [*_check_shape(resolved, document), *_check_inner(resolved, document)]
    faults += _by_both_lines(with_method, document)
    names = registry.BUILT_IN["launchers"]
    job, more = schema.validate(JobFile, _with_choices(document), also=names)
    faults += more
    if job is None or faults:
        keys = find_keys(text)
        for dotted in overrides or {}:
            keys.pop(tuple(dotted.split(".")), None)
        raise JobFileError(path, locate(path, text, keys, form.as_written(faults)))
    for section in [section for section in registry.SECTIONS if section not in resolved]:
        choice = getattr(job, section)
        if section != "algorithm":  # Each method has its own.
            chosen_method = resolved["algorithm"]
            method = registry.load("algorithms", chosen_method.name).of(chosen_method.options)
            choice = getattr(method, section)
            if section == "inner":
                choice = programs.inner_of(method, has_loop=job.has_loop)
        options = effective_options(registry.SECTIONS[section], choice)
        resolved[section] = Choice(name=choice.name, options=options)
    # Daemons run elsewhere, so they get the job's files by their full paths.
    home = path.parent.resolve()
    located, logs = programs.located(job.job, home), stores.located(job.log, home)
    assert launcher is not None
    chosen = {**resolved, "launcher": launchers.resolved(launcher)}
    if job.workers.min is None and (least := launchers.workers_min(launcher)):
        chosen["workers"] = dataclasses.replace(job.workers, min=least)
    whole: JobFile = dataclasses.replace(job, job=located, log=logs, **chosen)  # type: ignore[arg-type]
    if get(document, ("servers", "count")) is None:
        whole = shares.counted(whole)
    whole = parties.located(whole, home)
    if faults := _own_checks(whole, document):
        raise JobFileError(path, locate(path, text, find_keys(text), form.as_written(faults)))
    return whole


def _by_both_lines(faults: list[Fault], document: dict[str, Any]) -> list[Fault]:
    """What does not go with the method, and the line that names it, if the file has one."""
    others = [fault.path for fault in faults if fault.path[0] != "algorithm"]
    name = get(document, ("algorithm", "name"))
    if not others or len(others) < len(faults) or not isinstance(name, str):
        return faults
    what = ", ".join(_as_written(path, get(document, path)) for path in others)
    return [*faults, Fault(("algorithm", "name"), f"{name} does not go with {what}")]


def _as_written(path: KeyPath, value: Any) -> str:
    key = ".".join(map(str, path))
    return f"{key} = {json.dumps(value)}" if isinstance(value, str | int | float) else key


def _own_checks(job: JobFile, document: dict[str, Any]) -> list[Fault]:
    """What the schedule, or the method itself, finds wrong with a job that is valid otherwise."""
    method = registry.load("algorithms", job.algorithm.name).of(job.algorithm.options)
    if open_faults := [Fault(*fault) for fault in batches.faults(job)]:
        return open_faults
    if unclear := [Fault(*fault) for fault in schedule.faults(job)]:
        return unclear
    found: list[tuple[KeyPath, str, str]] = [*_clip_faults(job, method)]
    found += [*_average_faults(job, method), *_scaling_faults(job, method)]
    found += [*_link_faults(job, method), *_replica_faults(job, method)]
    found += shares.faults(job)
    found += [*_guest_faults(job, method)]
    found += shard_weights.faults(job, measures=method.lead.allows_cuts)
    found += programs.faults(job, method)
    found += parties.faults(job, method)
    steps = _gradient_steps(job, method)
    is_unused = not steps and not job.has_loop  # A script has its rate by `run.lr_factor`.
    if schedule.is_needed(job.schedule) and is_unused and not schedule.scales(job.schedule):
        what = f"{job.algorithm.name} has no optimiser that takes gradient steps"
        found.append((("schedule", "kind"), what, "remove [schedule]"))
    elif schedule.is_needed(job.schedule) and job.inner.name == "rprop":
        found.append((("inner", "name"), "rprop adapts its rates itself", "remove [schedule]"))
    groups = parameter_groups.faults(job.parameters, steps, job.algorithm.name)
    found += [*groups, *replicas.faults(job, method), *launchers.lacking(job, method)]
    with_method = [Fault(*fault) for fault in method.check(job)]
    if (most := batches.steps_planned(job)) < math.inf:
        samples = most * batches.bound(job)
        by_size = [*method.check_steps(job, most), *method.check_samples(job, samples)]
        with_method += [Fault(*fault) for fault in by_size]
    return [*(Fault(*fault) for fault in found), *_by_both_lines(with_method, document)]


def _gradient_steps(job: JobFile, method: Any) -> list[parameter_groups.Steps]:
    """The optimisers that take gradient steps: the replicas' own, and the servers' if gradients are
    pushed to it."""
    found = []
    is_ours = job.inner.name not in (inner.NONE, inner.OF_SCRIPT)
    if method.inner.name != inner.NONE and is_ours:
        found.append(("inner_optimizers", job.inner, False))
    if method.pushes_gradients(method.Options(**job.algorithm.options)):
        found.append(("optimizers", job.optimizer, True))
    return [
        parameter_groups.Steps(
            choice.name, choice.options, is_servers,
            parameter_groups.has_decay(registry.load(kind, choice.name).Options),
        )
        for kind, choice, is_servers in found
    ]  # fmt: skip


def _clip_faults(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Global clipping without a common gradient, or with a norm over several servers."""
    if job.gradient.clip != "global" or _steps_along_means(method):
        return
    if not method.pushes_gradients(method.Options(**job.algorithm.options)):
        what = f"{job.algorithm.name} pushes no gradients: each replica has its own"
        yield ("gradient", "clip"), what, 'use "replica"'
    elif job.servers.count != 1 and not _averages_gradients(job, method):
        yield ("gradient", "clip"), "one server knows the norm of a whole update", "use count = 1"


def _scaling_faults(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """More workers make a larger batch only where their gradients are averaged."""
    if schedule.scales(job.schedule) and not _averages_gradients(job, method):
        what = f"more workers of {job.algorithm.name} do not make the batch of an update larger"
        yield ("schedule", "lr_scaling"), what, "remove it"


def _link_faults(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Memory is local to a host, and torch.distributed's connections are open to any process."""
    # Any of the hosts may get a worker later: from a lost host, or by `dlctl scale`.
    possible = placement.takes_workers(job)
    if len(possible) > 1 and "group" in method.shape.links and not job.network.private:
        what = (
            f"what {job.algorithm.name} sends between {len(possible)} hosts is neither encrypted "
            "nor authenticated (SECURITY.md)"
        )
        instead = (
            "use sync or diloco, or [network] private = true if no one else is in their network"
        )
        yield ("algorithm", "name"), what, instead
    hosts = {agent for name, agent in placement.place(job).items() if name.startswith("worker")}
    if len(hosts) > 1 and "memory" in method.shape.links:
        what = (
            f"all workers of {job.algorithm.name} share the memory of one host, not of {len(hosts)}"
        )
        yield (
            ("algorithm", "name"),
            what,
            (
                "put them on one host, or use a method with servers and [replica] hogwild: so many "
                "processes of each host step in one model there"
            ),
        )


def _guest_faults(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Workers that join from elsewhere: how many, and whether they can."""
    workers = job.workers
    most = workers.max or workers.count
    if most < workers.count:
        what = f"the job itself starts {workers.count} workers"
        yield ("workers", "max"), what, f"use {workers.count} or more"
    if workers.min is not None and workers.min > max(most, workers.count):
        what = f"the run takes {max(most, workers.count)} workers at most"
        yield ("workers", "min"), what, "use fewer, or raise max"
    yield from _bind_faults(job, most)
    if most <= workers.count:
        return
    if method.shape.links:
        what = (
            f"the workers of {job.algorithm.name} connect to each other, and those that join can "
            "only dial out"
        )
        yield ("workers", "max"), what, "use a method with servers, such as diloco"
    if not job.uses_tcp:
        yield (
            ("workers", "max"),
            "others can only join over TCP",
            'set transport = "tcp" in [network]',
        )
    elif job.network.encryption == "none":
        what = "an invitation is a key, and the connections of this job have none"
        yield ("workers", "max"), what, 'set encryption = "curve" in [network]'
    if workers.processes > 1 and not job.has_loop:
        what = "a worker that joins is one process"
        yield ("workers", "max"), what, "use one process for each worker"


def _bind_faults(job: JobFile, most: int) -> Iterator[tuple[KeyPath, str, str]]:
    network = job.network
    if not network.bind:
        return
    if job.has_other_hosts:
        yield ("network", "bind"), "with hosts each has its own", "use bind and data in [[hosts]]"
    elif most <= job.workers.count:
        what = "no worker can join, and it is for these"
        yield ("network", "bind"), what, "raise max in [workers], or remove it"
    elif not network.address:
        what = "there is no address at which others reach it"
        yield ("network", "bind"), what, "set address in [network]"
    elif not network.port:
        what = "ports are forwarded, and this job takes any free ones"
        yield ("network", "bind"), what, "set port in [network]"


def _replica_faults(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Processes of a replica that step without locks."""
    if job.replica.hogwild == 1:
        return
    at, name = ("replica", "hogwild"), job.algorithm.name
    steps = method.inner.name != inner.NONE
    if not (steps and method.pushes_gradients(method.Options(**job.algorithm.options))):
        what = f"replicas of {name} do not both step by themselves and push gradients"
        yield at, what, 'use "downpour", or 1'
    elif job.inner.name == inner.NONE or not inner.is_plain(job.inner):
        what = (
            f"the state of {job.inner.name} would be local to each process: only parameters are "
            "shared"
        )
        yield ("inner", "name"), what, 'use "sgd" without momentum'
    if job.workers.device == "cuda":
        yield ("workers", "device"), "processes of a replica share the host's memory", 'use "cpu"'
    if job.workers.processes > 1:
        yield ("workers", "processes"), "its processes are those of [replica] hogwild", "use 1"
    if job.workers.loader_processes:
        what = "with [replica] hogwild each process loads its own data"
        yield ("workers", "loader_processes"), what, "use 0"
    if job.gradient.precision == "fp16":
        what = "with [replica] hogwild each process would have its own scale"
        yield ("gradient", "precision"), what, 'use "bf16"'


def _averages_gradients(job: JobFile, method: Any) -> bool:
    if _steps_along_means(method):
        return True
    options = method.Options(**job.algorithm.options)
    return bool(method.pushes_gradients(options) and method.shard.averages)


def _steps_along_means(method: Any) -> bool:
    """Whether replicas compute the mean, and step along it."""
    return bool(method.replica.averages)


def _has_momentum(job: JobFile) -> bool:
    """Whether the servers' optimiser is stateful."""
    kind = registry.load("optimizers", job.optimizer.name)
    return bool(kind(kind.Options(**job.optimizer.options)).slots)


def _pushes_some(job: JobFile, method: Any) -> bool:
    """Whether a push may contain only some elements."""
    return bool(method.takes_parts or registry.load("compressors", job.compression.name).selects)


def _average_faults(job: JobFile, method: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """An average of parameters that the servers do not update, or `evaluate` without an average."""
    if job.average.ema and (method.shard is None or method.shape.model != "tables"):
        what = f"{job.algorithm.name} has no parameters that the servers' optimiser updates"
        yield ("average", "ema"), what, "remove [average]"
    elif job.average.ema and _has_momentum(job) and _pushes_some(job, method):
        what = (
            f"every update goes over all elements then, and {job.optimizer.name} would step along "
            "those without a push"
        )
        yield ("average", "ema"), what, 'use [optimizer] name = "sgd", or pushes of all elements'
    elif job.average.evaluate and not job.average.ema:
        yield ("average", "evaluate"), "there is no average to evaluate", "add ema = 0.999"


def effective_options(kind: str, choice: Choice) -> dict[str, Any]:
    """The options of a registry entry with its defaults filled in; `kind` as in the registry.

    Raises UsageError for an unknown name or options that are not valid.
    """
    options_class = registry.load(kind, choice.name).Options
    if options_class is None:
        return dict(choice.options)
    options, faults = schema.validate(options_class, dict(choice.options))
    if options is None:
        problems = "; ".join(f"{'.'.join(map(str, f.path))} {f.message}" for f in faults)
        named = f'{registry.singular(kind)} "{choice.name}"'
        raise UsageError(f"options of {named} are not valid: {problems}")
    return _plain(dataclasses.asdict(options))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they are in JSON: daemons read a list instead of a tuple."""
    return {key: _without_tuples(value) for key, value in options.items()}


def _without_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain(value)
    return [*map(_without_tuples, value)] if isinstance(value, tuple) else value


def _override(document: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        table: Any = document
        for key in parents:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise UsageError(f'cannot set "{dotted}": "{key}" is not a table in the job file')
        if value is None:
            table.pop(last, None)
        else:
            table[last] = copy.deepcopy(value)  # The next key may be in it.


def _resolve(section: str, kind: str, table: Any) -> tuple[Choice | None, list[Fault]]:
    """The choice of a section, its options complete, and its faults."""
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        return None, []  # the schema reports it
    name = table["name"]
    at = (section, "name")
    if not registry.is_known(kind, name):
        return None, [
            Fault(
                at,
                f"unknown {registry.singular(kind)}",
                did_you_mean(name, registry.names(kind), registry.ALIASES),
            )
        ]
    try:
        entry = load_launcher(name) if kind == "launchers" else registry.load(kind, name)
    except (ImportError, AttributeError) as error:
        return None, [Fault(at, f"cannot be loaded: {error}")]
    given = {key: value for key, value in table.items() if key != "name"}
    if entry.Options is None:
        return Choice(name=name, options=given), []
    options, faults = schema.validate(entry.Options, given, at=(section,), also=("name",))
    if options is None:
        return None, _moved(_with_owners(kind, name, faults), table)
    return Choice(name=name, options=_plain(dataclasses.asdict(options))), faults


def _with_owners(kind: str, name: str, faults: list[Fault]) -> list[Fault]:
    """The faults, those of unknown keys with the other names of this kind that have such a key."""
    if not any(fault.at_key for fault in faults):
        return faults
    owners: dict[Any, list[str]] = {}
    for other in registry.names(kind):
        with suppress(ImportError, AttributeError):  # third-party entry that cannot be loaded
            for field in dataclasses.fields(registry.load(kind, other).Options):
                owners.setdefault(field.name, []).append(other)
    return [_with_owner(name, owners.get(fault.path[-1], []), fault) for fault in faults]


def _with_owner(name: str, owners: list[str], fault: Fault) -> Fault:
    if not fault.at_key or not owners or name in owners:
        return fault
    have = "has" if len(owners) == 1 else "have"
    return fault._replace(
        message=f"{name} has no {fault.path[-1]}", suggestion=f"{', '.join(owners)} {have} it"
    )


def _moved(faults: list[Fault], table: dict[str, Any]) -> list[Fault]:
    """The faults, with suggestions for keys that have moved to another section."""
    new = f'write [inner] with name = "sgd" and lr = {table.get("local_lr")!s:.20}'
    return [
        fault._replace(message="replicas have an optimiser of their own now", suggestion=new)
        if fault.path == ("algorithm", "local_lr")
        else fault
        for fault in faults
    ]


def _check_inner(resolved: Mapping[str, Choice], document: dict[str, Any]) -> list[Fault]:
    """Conflicts with how the method's replicas step."""
    name = resolved["algorithm"].name if "algorithm" in resolved else DEFAULT_ALGORITHM
    if "algorithm" not in resolved and "algorithm" in document:
        return []
    chosen = resolved.get("inner")
    if chosen is None:
        return []
    options = resolved["algorithm"].options if "algorithm" in resolved else {}
    method = registry.load("algorithms", name).of(options)
    what, instead = programs.inner_fault(chosen, has_loop=programs.has_loop(document))
    if what:
        return [Fault(("inner", "name"), what, instead)]
    if method.inner.name == inner.NONE and chosen.name != inner.NONE:
        what = f"replicas of {name} make no steps of their own: the servers' optimiser does"
        instead = f"remove [inner]{_or_several_steps(name, options)}"
        return [Fault(("inner", "name"), what, instead)]
    if chosen.name == inner.NONE and method.push_kind(method.Options(**options)).is_displacement:
        what = f"{name} pushes the displacement of its replicas' own steps"
        usual = programs.inner_of(method, has_loop=programs.has_loop(document)).name
        return [Fault(("inner", "name"), what, f'use "{usual}", or remove [inner]')]
    lr = chosen.options.get("lr")
    is_ours = registry.load("inner_optimizers", chosen.name).Options is not None
    if not is_ours and (type(lr) not in (int, float) or not bounds.holds(LocalRate, lr)):
        what = "an optimiser of yours needs its lr here, a number >= 0"
        return [Fault(("inner", "name"), what, "add lr = ...")]
    return []


def _or_several_steps(name: str, options: dict[str, Any]) -> str:
    """The option by which replicas of a method that make no steps of their own would, if any."""
    method = registry.load("algorithms", name)
    if LOCAL_STEPS not in method.Options.__dataclass_fields__:
        return ""
    has_inner = method.of({**options, LOCAL_STEPS: 2}).inner.name != inner.NONE
    return f", or set {LOCAL_STEPS} = 2 or more in [algorithm]" if has_inner else ""


def _check_decay(resolved: Mapping[str, Choice]) -> list[Fault]:
    """A decay that is too large for the rate, which may be the default."""
    options = resolved["optimizer"].options if "optimizer" in resolved else {}
    lr, decay = options.get("lr", 0.0), options.get("weight_decay", 0.0)
    if not (fault := numeric_limits.decay_fault(lr, decay)):
        return []
    most = f"{numeric_limits.most_with(lr)} is the most with this lr"
    return [Fault(("optimizer", "weight_decay"), fault, most)]


def _check_exact_pushes(resolved: Mapping[str, Choice]) -> list[Fault]:
    """A compression that removes values which the algorithm requires."""
    algorithm, compression = resolved.get("algorithm"), resolved.get("compression")
    if algorithm is None or compression is None:
        return []
    if not registry.load("algorithms", algorithm.name).shape.exact:
        return []
    message = f"{algorithm.name} needs every push as it was computed"
    suggestion = 'use "none" with values = "float32"'
    if compression.name != "none":
        return [Fault(("compression", "name"), message, suggestion)]
    if compression.options["values"] != "float32":
        return [Fault(("compression", "values"), message, suggestion)]
    return []


def _check_exact_fetches(resolved: Mapping[str, Choice], document: dict[str, Any]) -> list[Fault]:
    """An algorithm that requires exact parameters, with servers that round them."""
    algorithm, path = resolved.get("algorithm"), ("servers", "fetch_values")
    if algorithm is None or get(document, path) not in ("float16", "bfloat16"):
        return []
    if not registry.load("algorithms", algorithm.name).shape.exact:
        return []
    return [Fault(path, f"{algorithm.name} needs the exact parameters", "remove it")]


def _check_shape(resolved: Mapping[str, Choice], document: dict[str, Any]) -> list[Fault]:
    """Conflicts with the method's shape. If it needs no servers, and the job file does not state a
    number, there are none.
    """
    if "algorithm" not in resolved and "algorithm" in document:
        return []
    from dlctl.algorithms.shapes import faults_of

    name = resolved["algorithm"].name if "algorithm" in resolved else DEFAULT_ALGORITHM
    method = registry.load("algorithms", name)
    faults = [Fault(("algorithm", "name"), f"{name}: {what}") for what in faults_of(method)]
    shape, path = method.shape, ("servers", "count")
    servers = document.setdefault("servers", {})
    if not isinstance(servers, dict):
        return faults  # the schema reports it
    count = servers.get("count")
    if count is None and not shape.needs_servers:
        servers["count"] = 0
    elif count == 0 and shape.needs_servers:
        faults.append(Fault(path, f"{name} keeps its parameters on servers", "use 1 or more"))
        if "algorithm" in resolved:
            faults.append(Fault(("algorithm", "name"), f"{name} needs servers.count of 1 or more"))
    elif type(count) is int and count > 0 and not shape.needs_servers:
        faults.append(Fault(path, f"{name} has no servers", "use 0, or remove it"))
        faults.append(Fault(("algorithm", "name"), f"{name} needs servers.count = 0"))
    if not shape.sends:
        given = [key for key in ("push", "fetch") if get(document, ("limits", key))]
        what = f"{name} pushes and fetches nothing that could be limited"
        faults += [Fault(("limits", key), what, "remove it") for key in given]
    if not shape.needs_servers:
        uses = {"optimizer": "steps are the replicas' own: use [inner]", "compression": "remove it"}
        for section, instead in uses.items():
            if section in resolved:
                faults.append(Fault((section, "name"), f"{name} has no servers", instead))
    if method.is_driven and get(document, ("job", "stop", "target")):
        what = f"{name} evaluates the model only at its end: the target would be ignored"
        faults.append(Fault(("job", "stop", "target"), what, "remove it"))
    if method.is_driven and get(document, ("data", "bad_samples_max")):
        what = f"{name} compares sums over the dataset: it can do without no sample"
        faults.append(Fault(("data", "bad_samples_max"), what, "remove it"))
    is_program = bool(get(document, ("job", "script")) or get(document, ("job", "module")))
    processes = get(document, ("workers", "processes"))
    faults += _check_processes(name, shape.ranks or is_program, processes)
    workers = get(document, ("workers", "count"))
    if type(workers) is int and shape.workers_max < workers <= COUNT_MAX:
        most = f"replicas of {name} ask each other; at most {shape.workers_max} can"
        faults.append(Fault(("workers", "count"), most))
        faults.append(
            Fault(("algorithm", "name"), f"{name} has {shape.workers_max} workers at most")
        )
    for section, known, why in (
        ("optimizer", shape.optimizers, shape.optimizers_why),
        ("compression", shape.compressors, ""),
    ):
        if section in resolved and known is not None and resolved[section].name not in known:
            what = f"{name} does not work with {resolved[section].name}{why and ': '}{why}"
            faults.append(Fault((section, "name"), what, f"use {' or '.join(known)}"))
    return faults


def _check_processes(name: str, can_be_several: bool, processes: Any) -> list[Fault]:
    if can_be_several or type(processes) is not int or processes <= 1:
        return []
    what = f"a replica of {name} is one process"
    return [Fault(("workers", "processes"), what, "use 1, or remove it")]


def _with_choices(document: dict[str, Any]) -> dict[str, Any]:
    """The document in the form of `JobFile`, without options: they are checked separately."""
    reshaped = dict(document)
    for section in (*registry.SECTIONS, "launcher"):
        table = document.get(section)
        if isinstance(table, dict):
            reshaped[section] = {"name": table["name"]} if "name" in table else {}
    return reshaped
