"""What a package written for an earlier version may still use, and what there is instead.

One table. `registry.load` checks by it the components of other packages when they are loaded; a
module, or a class of a method's sides, is asked for what it once had (`names_of`, `member`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_ALGORITHMS, _METHODS = "dlctl.algorithms", "dlctl.algorithms.methods"
_SYNC = f"{_METHODS}.sync"
_DATA = "dlctl.wire.messages.data"
_LIVE = "`Live[...]` (dlctl.job.settings) in the type of the option"
_ARRIVAL = "of the `Arrival` in `self.arrival`; see `dlctl.algorithms.rounds.Reference`"
_MEAN = "of the method's `mean`; see `dlctl.algorithms.means.Mean`"
_NORM = "`self.shared_norm`; see `dlctl.algorithms.shared_norm.SharedNorm`"
_HOLDING = f"{_ALGORITHMS}.holding"
_BARRIER = f"{_ALGORITHMS}.barrier.Barrier"
_ROUND = "`dlctl.algorithms.rounds.Rounds`"
MOVED: Mapping[str, str] = {
    "dlctl.batches": "dlctl.job.batches",
    "dlctl.clients": "dlctl.job.clients",
    "dlctl.config": "dlctl.job.config",
    "dlctl.flat": "dlctl.model.flat",
    "dlctl.frozen": "dlctl.model.frozen",
    "dlctl.inner": "dlctl.job.inner",
    "dlctl.machine": "dlctl.wire.machine",
    "dlctl.messages": "dlctl.wire.messages",
    "dlctl.parameter_groups": "dlctl.model.parameter_groups",
    "dlctl.placement": "dlctl.job.placement",
    "dlctl.rows": "dlctl.shards.rows",
    "dlctl.schedule": "dlctl.job.schedule",
    "dlctl.settings": "dlctl.job.settings",
    "dlctl.vector": "dlctl.model.vector",
    **{
        f"{_ALGORITHMS}.{name}": f"{_METHODS}.{name}"
        for name in (
            "allreduce", "async_diloco", "dc_asgd", "decoupled_diloco", "demo", "dgc",
            "downpour", "easgd", "easgd_atomic", "epoch_cut", "fedavg", "fedbuff", "gossip",
            "hogwild", "local_sgd", "loscar", "noloco", "ringleader", "ringmaster",
            "rows", "sandblaster", "softsync", "sparseloco", "ssp", "streaming_diloco", "sync",
        )
    },
    f"{_ALGORITHMS}.backups": _SYNC,
    f"{_METHODS}.backups": _SYNC,
    f"{_METHODS}.quorum": f"{_ALGORITHMS}.quorum",
}  # fmt: skip
"""Module of an earlier version -> what it is called now."""
INSTEAD: Mapping[str, str] = {
    # modules, and names in modules
    **MOVED,
    f"{_ALGORITHMS}.sparse": f"{_ALGORITHMS}.means, and `mean = SparseMean` in the Method",
    f"{_ALGORITHMS}.base.Outcome": "`push.outcome(kind)`, whose type is PushOutcome",
    f"{_METHODS}.local_sgd.LIVE": _LIVE,
    "dlctl.compress.base.dice": "dlctl.compress.base.rng_of",
    f"{_ALGORITHMS}.base.Snapshot": f"{_ALGORITHMS}.base.DriveSnapshot",
    f"{_ALGORITHMS}.needs.Data": f"{_ALGORITHMS}.needs.NextBatch",
    f"{_ALGORITHMS}.needs.LEFT_OUT_MAX": f"{_ALGORITHMS}.rounds.DISCARDED_MAX, or Discards",
    f"{_ALGORITHMS}.base.dense": "`delta.dense(size)`",
    f"{_ALGORITHMS}.quorum.meet_all": f"{_ALGORITHMS}.barrier.meet_all",
    f"{_ALGORITHMS}.shapes.needs_of": f"{_ALGORITHMS}.shapes.served",
    f"{_METHODS}.ssp.AHEAD_MAX": f"{_ALGORITHMS}.roster.AHEAD_MAX",
    f"{_METHODS}.streaming_diloco.OfFragments": "`mean = FragmentMean` in the Method",
    f"{_SYNC}.AHEAD_MAX": f"{_ALGORITHMS}.roster.AHEAD_MAX",
    f"{_SYNC}.Accrues": f"{_ALGORITHMS}.stepwise.Accrues",
    f"{_SYNC}.Barrier": _BARRIER,
    f"{_SYNC}.HeldPush": f"{_HOLDING}.HeldPush",
    f"{_SYNC}.HoldingSide": f"{_HOLDING}.HoldingSide",
    f"{_SYNC}.NOISE_EVERY": f"{_HOLDING}.NOISE_EVERY",
    f"{_SYNC}.PendingStep": f"{_HOLDING}.JointStep",
    f"{_SYNC}.accrue": f"{_ALGORITHMS}.stepwise.accrue",
    f"{_SYNC}.write": f"{_ALGORITHMS}.stepwise.write",
    "dlctl.compress.base.DENSITY": _LIVE,
    "dlctl.job.settings.count": _LIVE,
    "dlctl.job.settings.fraction": _LIVE,
    "dlctl.job.settings.interval": _LIVE,
    # hooks and helpers of classes
    f"{_ALGORITHMS}.base.ReplicaSide.answered": "`Ask(then=...)`",
    f"{_ALGORITHMS}.base.ReplicaSide.placed": f"`after` {_ARRIVAL}",
    f"{_ALGORITHMS}.base.ReplicaSide.placing": f"`before` {_ARRIVAL}",
    "dlctl.launch.launcher.Launcher.doubts": "`warnings`",
    f"{_METHODS}.local_sgd.Replica._accrue": f"`steps` of {_ROUND}",
    f"{_METHODS}.local_sgd.Replica._push": f"`end` of {_ROUND}, and `self.write_residual`",
    f"{_METHODS}.local_sgd.Replica._take_way": f"`end` of {_ROUND}",
    f"{_METHODS}.local_sgd.Replica.owes": "`has_rest` of `local_sgd.averaged`",
    f"{_METHODS}.local_sgd.Replica.round_steps": f"the argument of `steps` of {_ROUND}",
    f"{_METHODS}.streaming_diloco.Replica._walk": "`steps` of `streaming_diloco.Fragments`",
    f"{_SYNC}.Replica._accrue": "`stepwise.accrue(self)`",
    f"{_SYNC}.Replica._join": "`barrier.join()`",
    f"{_SYNC}.Replica._meet": "`barrier.meet(clock)`",
    f"{_SYNC}.Replica._next_step": "`barrier.next_step(clock)`",
    f"{_SYNC}.Replica._write": "`yield stepwise.write(self, samples, clock)`",
    f"{_HOLDING}.HoldingSide._apply": f"`apply` {_MEAN}",
    f"{_HOLDING}.HoldingSide._counts": f"`counts` {_MEAN}",
    f"{_HOLDING}.HoldingSide._kept": f"`kept` {_MEAN}",
    f"{_HOLDING}.HoldingSide._may_update": "`may_make` of `self.steps`",
    f"{_HOLDING}.HoldingSide._mean_of": f"`of` {_MEAN}",
    f"{_HOLDING}.HoldingSide._members": "`self.roster.members`",
    f"{_HOLDING}.HoldingSide._shares": f"`shares` {_MEAN}",
    f"{_HOLDING}.HoldingSide._update": "`make` of `self.steps`",
    f"{_HOLDING}.HoldingSide.rule": "`mean` of the Method",
    f"{_ALGORITHMS}.base.ShardSide.norm_known": _NORM,
    f"{_ALGORITHMS}.base.ShardSide.norm_part": _NORM,
    f"{_ALGORITHMS}.base.ShardSide.takes_parts": f"`takes_parts` {_MEAN}",
    # fields
    f"{_DATA}.Push.epoch": "`term`, the fencing token of the worker's slot",
    f"{_DATA}.Push.generation": "`shard_term`, the fencing token of the shard",
    # arguments
    "Ask(wait=)": "`then`: called with the answer",
    "Method(live=)": _LIVE,
    "PushKind(is_way=)": "`is_displacement`",
    "Shard.apply(told=)": "`counters`",
    "Table(rows=)": "`copies`",
}
"""Name of an earlier version -> what to use instead."""
DECLARED: Mapping[str, tuple[str, Any]] = {
    f"{_ALGORITHMS}.base.Lead.cohort": ("portions", "clients"),
    f"{_ALGORITHMS}.base.Lead.cut_epoch": ("cuts_epochs", True),
    f"{_ALGORITHMS}.base.Lead.drive": ("portions", "batch"),
    f"{_ALGORITHMS}.base.Lead.quorum": ("chooses", True),
}
"""Hook -> the attribute by which a class declares that it has it."""
OURS = ("dlctl", "builtins", "abc")
_KEYWORD = re.compile(
    r"([\w.]+?)(?:\.__(?:init|new)__)?\(\) got an unexpected keyword argument '(\w+)'"
)


class Outdated(ImportError):
    """A component uses what is not there any more."""


def names_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has had other names."""

    def find(name: str) -> Any:
        if why := _why(f"{module}.{name}"):
            raise Outdated(why)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def member(of: object, name: str) -> AttributeError:
    """The error for an attribute that an object does not have."""
    kind = type(of)
    found = filter(None, (_why(f"{_path(base)}.{name}") for base in kind.__mro__))
    return AttributeError(next(found, f"{kind.__name__!r} object has no attribute {name!r}"))


def argument(error: TypeError) -> str:
    """What to use instead of the argument that a call had too many; "" if that is not known."""
    found = _KEYWORD.search(str(error))
    return _why(f"{found[1]}({found[2]}=)") if found else ""


def checked(load: Callable[[], Any], what: str, base: str = "") -> Any:
    """Load a component of another package. Raises Outdated if it was made for an earlier version.

    what: as in errors. base: the path of the class that it must be derived from.
    """
    try:
        component = load()
    except Outdated as error:
        raise Outdated(f"{what}: {error}") from error
    except (ModuleNotFoundError, TypeError) as error:
        why = argument(error) if isinstance(error, TypeError) else _why(error.name or "")
        if not why:
            raise
        raise Outdated(f"{what}: {why}") from error
    for kind in _classes(component):
        if why := next(_faults(kind), ""):
            raise Outdated(f"{what}: {why}")
    if base and base not in map(_path, component.__mro__):
        raise Outdated(f"{what}: {_path(component)} has to be derived from {base}")
    return component


def _classes(component: Any) -> Iterator[type[Any]]:
    """The classes of which a component consists."""
    if isinstance(component, type):
        yield component
    elif is_dataclass(component):
        parts = (getattr(component, part.name) for part in fields(component))
        yield from (part for part in parts if isinstance(part, type))


def _faults(kind: type[Any]) -> Iterator[str]:
    """What a class, or a base of it from elsewhere, has that is not used any more."""
    theirs = [owner for owner in kind.__mro__ if owner.__module__.partition(".")[0] not in OURS]
    for name in (name for owner in theirs for name in vars(owner)):
        for base in kind.__mro__:
            here = f"{_path(base)}.{name}"
            if why := _why(here):
                yield f"{_path(kind)}.{name}: {why}"
            key, value = DECLARED.get(here, ("", None))
            if key and getattr(kind, key) != value:
                yield f"{_path(kind)}.{name}: it is called only with `{key} = {value!r}`"


def _why(name: str) -> str:
    return f"{name} is not there any more; use {INSTEAD[name]}" if name in INSTEAD else ""


def _path(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
