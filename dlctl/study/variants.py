"""The job of another method: the user's job file with that method in place of its own.

"downpour+topk" is a method with another compression of its pushes. "torch" and "ddp" are no methods
of dlctl: one plain torch process, and torch's DDP over as many processes as the job has workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlctl import registry
from dlctl.job.config import DEFAULT_ALGORITHM

Json = dict[str, Any]
OF_METHODS = ("inner", "optimizer", "compression")
"""Sections whose defaults belong to the method."""


WITH = "+"
ALONE, DDP = PLAIN = ("torch", "ddp")
LIKE_PLAIN = "allreduce"
"""The method whose defaults they have: the replicas' own optimiser steps along the mean gradient of
all workers."""


def overrides(document: Mapping[str, Any], name: str) -> Json:
    """The keys to change in a job file for the variant `name` (`jobfile.load`; None removes one).

    The file's own method stays as it is. Another one gets its own defaults: rates and intervals of
    one method mean nothing to another. All else stays: data, model, batch sizes, workers, limits.
    Raises DlctlError for a method or compression that does not exist.
    """
    if name in PLAIN:
        changes = _of_method(document, LIKE_PLAIN)
        if name == ALONE:
            changes["workers"] = {**document.get("workers", {}), "count": 1}
        return changes
    name, _, compression = name.partition(WITH)
    changes = _of_method(document, name)
    if compression:
        registry.load("compressors", compression)
        changes["compression"] = {"name": compression}
    return changes


def own_method(document: Mapping[str, Any]) -> str:
    """The name of the job file's own method, which it need not write."""
    name: str = document.get("algorithm", {}).get("name", DEFAULT_ALGORITHM)
    return name


def _of_method(document: Mapping[str, Any], name: str) -> Json:
    method, own = registry.load("algorithms", name), document.get("algorithm", {})
    is_own = name == own_method(document)
    if is_own:
        method = method.of({key: value for key, value in own.items() if key != "name"})
    defaults: Json = {}
    for section in OF_METHODS:
        choice = getattr(method, section)
        defaults[section] = {"name": choice.name, **choice.options}
    if is_own:
        return {section: value for section, value in defaults.items() if section not in document}
    changes: Json = {"algorithm": {"name": name}, **defaults}
    servers = document.get("servers", {}).get("count", 1)
    if not method.shape.needs_servers:
        changes |= {"servers": {"count": 0}, "optimizer": None, "compression": None}
        changes["limits"] = None  # They are of pushes and fetches.
    elif not servers:
        changes["servers"] = {"count": 1}
    return changes
