"""What commands do on the other hosts of a run when its coordinator cannot do it any more, and what
its launcher says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlctl.errors import DlctlError
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.util import hints, notes

if TYPE_CHECKING:
    from dlctl.job.config import Host
    from dlctl.launch.launcher import Launcher

Job = dict[str, Any]


def launcher_of(job: Job) -> Launcher | None:
    """The launcher of a stored job (see `read_job`); None: it has no other hosts. Raises DlctlError
    if it is not installed any more.
    """
    chosen = job.get("launcher", {})
    if not chosen.get("places") and not any(host.get("ssh") for host in job.get("hosts", ())):
        return None
    from dlctl.launch import launcher  # imported late: most runs have no other hosts

    return launcher.made(chosen["name"], chosen["options"])


def _known(snapshot: Snapshot) -> Launcher | None:
    """The launcher of a run, for what is only shown: None if it is not installed any more, too."""
    try:
        return launcher_of(read_job(snapshot.directory))
    except DlctlError:
        return None


def can_ask(snapshot: Snapshot) -> bool:
    """Whether the run has other hosts, which can be asked at any time."""
    launcher = _known(snapshot)
    return launcher is not None and launcher.can_ask


def of(snapshot: Snapshot) -> dict[str, Host]:
    """Agent -> its host, for hosts that can be asked at any time. Raises as `launcher_of` does."""
    launcher = launcher_of(read_job(snapshot.directory))
    return _hosts(snapshot) if launcher is not None and launcher.can_ask else {}


def _hosts(snapshot: Snapshot) -> dict[str, Host]:
    from dlctl.job import placement
    from dlctl.job.config import of_stored

    agents = placement.agents(of_stored(read_job(snapshot.directory)).places)
    return {name: host for name, host in agents.items() if host.is_other}


def agents(snapshot: Snapshot) -> list[str]:
    """The agents on other hosts."""
    return [*_hosts(snapshot)]


def moves(snapshot: Snapshot) -> bool:
    """Whether the next coordinator may be on another machine than the last one."""
    launcher = _known(snapshot)
    return launcher is not None and launcher.moves


def have_copies(snapshot: Snapshot) -> bool:
    """Whether daemons on other hosts have copies of the task's files, from the start of the run."""
    launcher = _known(snapshot)
    return launcher is not None and launcher.copies_files


def wait_s(job: Job) -> float:
    """How long a start may wait for its hosts."""
    launcher = launcher_of(job)
    return 0.0 if launcher is None else launcher.wait_s


def held(snapshot: Snapshot) -> tuple[str, str]:
    """The name of the launcher, and what the run has at the owner of its hosts, as in "job 17"; "":
    nothing, or it is unknown.
    """
    launcher = _known(snapshot)
    if launcher is None:
        return "", ""
    return read_job(snapshot.directory)["launcher"]["name"], launcher.held(snapshot.directory)


def given_up(snapshot: Snapshot) -> list[str]:
    """The hosts that the run could not reach any more, by their names in the job file."""
    hosts = _hosts(snapshot) if can_ask(snapshot) else {}
    return [
        host.name for name, host in hosts.items() if snapshot.daemon(name).get("state") == "failed"
    ]


def not_ended(snapshot: Snapshot) -> list[str]:
    """The hosts of an ended run that were not notified of its end."""
    hosts = _hosts(snapshot) if can_ask(snapshot) else {}
    rows = [(host, snapshot.daemon(name)) for name, host in hosts.items()]
    return [host.name for host, row in rows if row and row.get("state") != "stopped"]


def end(snapshot: Snapshot, grace_s: float, *, purge: bool) -> list[str]:
    """Terminate what this run left there; returns the hosts that were unreachable or failed to do
    so, and warns of each. `purge`: also remove the shards and files there.
    """
    launcher, failed = launcher_of(read_job(snapshot.directory)), []
    if launcher is None:
        return []
    for left in launcher.end(snapshot.directory, _hosts(snapshot), grace_s, purge=purge):
        if left.error is not None:
            _warn(left.error)
        for line in left.done:
            notes.note(line)
        if left.may_run:
            failed.append(left.host)
    return failed


def _warn(error: DlctlError) -> None:
    notes.warn("; ".join(filter(None, (error.message, hints.in_a_line(error.hint)))))
