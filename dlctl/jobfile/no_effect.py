"""Warnings about valid settings of a job file that have no effect, or not the intended one."""

from __future__ import annotations

from collections.abc import Iterator

from dlctl.job import rounds
from dlctl.job.config import JobFile
from dlctl.launch.launcher import of


def warnings(job: JobFile) -> list[str]:
    """One sentence each."""
    texts = [_push_before_fetch(job), *_few_rounds(job), *_launcher(job)]
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


def _few_rounds(job: JobFile) -> Iterator[str]:
    if (found := rounds.few(job)) is not None:
        yield found.text()


def _launcher(job: JobFile) -> Iterator[str]:
    launcher = of(job)
    yield from (f"[launcher] {warning}" for warning in launcher.warnings())
    if launcher.is_reclaimed and not job.checkpoints.every_s:
        yield (
            f"[checkpoints] every_s = 0: {launcher.title} may take the hosts back, and only a "
            "checkpoint survives that for sure"
        )
