"""Warnings about valid settings of a job file that have no effect."""

from __future__ import annotations

from dlctl.config import JobFile


def doubts(job: JobFile) -> list[str]:
    """One sentence each."""
    texts = [_push_before_fetch(job), _slurm_extra(job)]
    return [text for text in texts if text]


def _push_before_fetch(job: JobFile) -> str:
    options = job.algorithm.options
    if not options.get("push_before_fetch"):
        return ""
    why = []
    if options.get("overlap"):
        why.append("overlap is true, and steps are made while a fetch is under way")
    push, fetch = options.get("push_every_steps"), options.get("fetch_every_steps")
    if isinstance(push, int) and isinstance(fetch, int) and fetch % push:
        why.append(f"{push} steps between pushes do not divide {fetch} between fetches")
    if not why:
        return ""
    return f"push_before_fetch: fetches lack steps of the replica itself: {'; '.join(why)}"


def _slurm_extra(job: JobFile) -> str:
    for option in job.slurm.extra:
        _, _, value = option.partition("=")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            return (
                f"[slurm] extra: the quotes in {option} become part of its value; none are needed"
            )
    return ""
