"""What commands do on the other hosts of a run when its coordinator cannot do it any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl.errors import DlctlError
from dlctl.runs.snapshot import Snapshot, read_job
from dlctl.util import hints, notes

if TYPE_CHECKING:
    from dlctl.config import Host

ANSWER_S = 20.0
"""For a host to answer, on top of the time that its work may take."""


def of(snapshot: Snapshot) -> dict[str, Host]:
    """Agent -> its host, for hosts reached over ssh."""
    hosts = read_job(snapshot.directory).get("hosts")
    if not hosts:
        return {}
    from dlctl import placement  # imported late: most runs have no other hosts
    from dlctl.config import Host, from_dict

    agents = placement.agents([from_dict(Host, host) for host in hosts])
    return {name: host for name, host in agents.items() if host.ssh}


def given_up(snapshot: Snapshot) -> list[str]:
    """The hosts that the run could not reach any more, by their names in the job file."""
    hosts = of(snapshot).items()
    return [host.ssh for name, host in hosts if snapshot.daemon(name).get("state") == "failed"]


def not_ended(snapshot: Snapshot) -> list[str]:
    """The hosts of an ended run that were not notified of its end."""
    rows = [(host, snapshot.daemon(name)) for name, host in of(snapshot).items()]
    return [host.ssh for host, row in rows if row and row.get("state") != "stopped"]


def end(snapshot: Snapshot, grace_s: float, *, purge: bool) -> list[str]:
    """Terminate what this run left there; returns the hosts that were unreachable or failed to do
    so, and warns of each. `purge`: also remove the shards and files there.
    """
    if read_job(snapshot.directory).get("slurm", {}).get("nodes"):
        return _end_job(snapshot, at_once=grace_s <= 0)
    hosts = of(snapshot)
    if not hosts:
        return []
    from dlctl.launch import ssh
    from dlctl.launch.answers import explain
    from dlctl.launch.remote import end_request

    request = end_request(snapshot.run_id, grace_s=round(grace_s), purge=purge)
    failed = []
    for agent, answer in ssh.ask(hosts, request, grace_s + ANSWER_S).items():
        done, host = answer.value if answer.is_good else None, hosts[agent].ssh
        if done is None:
            _warn(explain(answer))
        for what, key in (("ended", "ended"), ("could not end", "left")):
            if done is not None and done[key]:
                notes.note(f"{what} on {host}: {', '.join(map(str, done[key]))}")
        if done is None or done["left"]:
            failed.append(host)
    return failed


def _end_job(snapshot: Snapshot, *, at_once: bool) -> list[str]:
    """`end` for a run on Slurm's nodes: its Slurm job is the only way to reach them."""
    from dlctl.launch import slurmcalls

    handle = slurmcalls.read_handle(snapshot.directory)
    try:
        slurmcalls.end(snapshot.directory, at_once=at_once)
    except DlctlError as error:
        _warn(error)
        return [error.where or "Slurm's nodes"]
    if handle is not None:
        notes.note(f"the Slurm job {handle.job_id or handle.name} is over")
    return []


def _warn(error: DlctlError) -> None:
    notes.warn("; ".join(filter(None, (error.message, hints.in_a_line(error.hint)))))
