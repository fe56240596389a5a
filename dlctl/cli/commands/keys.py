"""`dlctl keys`: give a run new keys, create a read-only key, invite workers."""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import time
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from dlctl import __version__
from dlctl.cli.group import CommandGroup, Documented
from dlctl.cli.options import (
    OUTPUT,
    force_option,
    job_option,
    json_option,
    require_free,
    wait_options,
)
from dlctl.cli.ui import console, live
from dlctl.control import keys
from dlctl.control.invitation import SUFFIX, InvitationFile, release
from dlctl.control.reader import ReaderKey
from dlctl.errors import DlctlError, UsageError
from dlctl.job.config import of_stored
from dlctl.launch import addresses
from dlctl.ops import control, next_step, stop
from dlctl.ops.recover import explained
from dlctl.runs import lock, select
from dlctl.runs.database import RunDb
from dlctl.runs.snapshot import Snapshot, natural, read_job
from dlctl.util import outfile, values
from dlctl.util.names import COORDINATOR

SCHEMA = "dlctl.keys/1"
ANSWER_S = 60.0
"""Timeout for the new key to be persisted."""


@click.group(
    "keys",
    CommandGroup,
    examples=[
        "dlctl keys rotate  # new keys for all daemons, while the job continues",
        "dlctl keys reader bob.key  # a file that gives bob read-only access",
        "dlctl keys invite bob  # a file with which bob joins as a worker",
    ],
)
def command() -> None:
    """The key of a run is a file in its directory; the keys of all its connections are derived from
    it.
    """


@command.subcommand("dlctl keys rotate --no-wait  # return when the new key is saved")
@wait_options
@job_option
@json_option
def rotate(limit_s: float | None, no_wait: bool, job: str | None) -> None:
    """Give a job new keys; the old ones become invalid.

    All daemons are replaced, with keys derived from the new run key: servers resume with their
    shards, and workers start over, as after a crash. That needs durability = "process" or "disk";
    with "none", stop the job first and start it afterwards. If a process dies meanwhile, the run
    recovers automatically, or with "dlctl recover". A run that is not live only gets a new key
    file. Invitations end: write new ones with "dlctl keys invite".
    """
    snapshot = select.look(job)
    if snapshot.is_live:
        rows = [row for row in snapshot.daemons if row.get("state") in control.AT_WORK]
        begun = sorted([COORDINATOR, *(row["name"] for row in rows)], key=natural)
        old = keys.keyring(snapshot.directory, is_encrypted=False).fingerprint
        control.ask(snapshot, "rotate", {"old": old, "by": _who()}, ANSWER_S)
        if not no_wait:
            with live.progress() as progress:
                control.wait(snapshot, begun, limit_s, "all have new keys", progress)
    else:
        _renew(snapshot)
        begun = []
    console.note(f"{snapshot.run_id} has new keys; the old ones, and all invitations, are invalid")
    fingerprint = keys.keyring(snapshot.directory, is_encrypted=False).fingerprint
    data = {"run": snapshot.run_id, "fingerprint": fingerprint, "restarted": begun}
    console.show(SCHEMA, data, "")


@command.subcommand(
    "dlctl keys reader bob.key  # bob then uses: dlctl status --key bob.key",
    "dlctl keys reader bob.key --force  # replace it, after a rotation",
)
@click.argument("file", type=OUTPUT)
@force_option
@job_option
@json_option
def reader(file: Path, force: bool, job: str | None) -> None:
    """Write a key that grants access to the status, and nothing else.

    FILE has all that its owner needs: the address, the coordinator's public key and a secret key.
    Only you can read it (mode 0600); hand it over through a channel that you trust. "-" is standard
    output. Its owner can neither change nor stop the run. It is valid until "dlctl keys rotate", or
    a start on another port. The run needs transport = "tcp", and an address that is reachable from
    there.
    """
    if console.settings.json and outfile.is_stdout(file):
        raise UsageError("--json prints to standard output too: write the key to a file")
    made = _readers_key(select.look(job))
    require_free(force, file)
    outfile.write(file, made.to_bytes(), 0o600)
    where = f"{made.run} at {made.address}"
    console.note(f"{values.path(str(file))} gives access to the status of {where}")
    console.show(SCHEMA, {"run": made.run, "address": made.address, "file": str(file)}, "")


@command.subcommand(
    "dlctl keys invite bob  # bob then joins: dlctl join --invite bob.invite -- python train.py",
    "dlctl keys invite lab-3 --hours 72  # for three days",
)
@click.argument("name")
@click.option(
    "--hours",
    type=click.FloatRange(0.01, 24 * 365),
    default=24.0,
    show_default=True,
    help="How long the invitation is valid.",
)
@force_option
@job_option
@json_option
def invite(name: str, hours: float, force: bool, job: str | None) -> None:
    """Invite a worker from anywhere: write NAME.invite, with which it joins.

    The file has all that "dlctl join" needs: the address, the coordinator's public key and a secret
    key. Only you can read it (mode 0600); hand it over through a channel that you trust. It is for
    one worker, which may train, and nothing else. It is valid until it expires, "dlctl keys
    revoke", "dlctl keys rotate", or a stop of the run; then its worker is sent away, too. The run
    needs transport = "tcp", an address that is reachable from there, a training script ([job]
    script or module), and room for it: max in [workers].
    """
    file = Path(f"{name}{SUFFIX}")
    snapshot = select.look(job)
    control.require_live(snapshot, "joined")
    require_free(force, file)
    serial, expires = secrets.token_hex(8), time.time() + hours * 3600.0
    _require_script(snapshot)
    asked = {"name": name, "serial": serial, "expires": expires}
    row = control.ask(snapshot, "invite", asked, ANSWER_S)
    made = _invitation(snapshot, row)
    outfile.write(file, made.to_bytes(), 0o600)
    console.note(f"{file} invites {name} to {made.run} at {made.address}, for {hours:g} h")
    data = {"run": made.run, "name": name, "worker": row["worker"], "expires": expires}
    console.show(SCHEMA, {**data, "address": made.address, "file": str(file)}, "")


@command.subcommand("dlctl keys revoke bob  # its worker is gone at once, and the run goes on")
@click.argument("name")
@job_option
@json_option
def revoke(name: str, job: str | None) -> None:
    """End an invitation at once: its worker is dropped, and its pushes are refused."""
    snapshot = select.look(job)
    control.require_live(snapshot, "left by an invited worker")
    row = control.ask(snapshot, "revoke", {"name": name}, ANSWER_S)
    console.note(f"the invitation of {name} has ended: {row['ended']}")
    console.show(SCHEMA, {"run": snapshot.run_id, "name": name, "ended": row["ended"]}, "")


@command.command(
    "list", cls=Documented, examples=["dlctl keys list  # who is invited, and who is there"]
)
@job_option
@json_option
def listed(job: str | None) -> None:
    """Show the invitations of a live run, those that have ended included, and their workers."""
    snapshot = select.look(job)
    control.require_live(snapshot, "asked for its invitations")
    rows = control.ask(snapshot, "invitations", {}, ANSWER_S)["invitations"]
    table = console.table(
        {
            "NAME": row["name"], "WORKER": row["worker"], "STATE": row["state"],
            "EXPIRES": time.strftime("%Y-%m-%d %H:%M", time.localtime(row["expires"])),
            "HOST": row["host"],
        }
        for row in rows
    )  # fmt: skip
    shown = [{key: value for key, value in row.items() if key != "key"} for row in rows]
    data = {"run": snapshot.run_id, "invitations": shown}
    console.show(SCHEMA, data, table if rows else "nobody is invited: dlctl keys invite NAME")


def _require_script(snapshot: Snapshot) -> None:
    """Raises DlctlError for a run that trains a task: its code is on this machine only."""
    if not of_stored(read_job(snapshot.directory)).has_loop:
        raise DlctlError(
            f"{snapshot.run_id} trains a task, whose files a worker from elsewhere does not have",
            hint="use script or module in [job], with dlctl.attach: dlctl init shows how",
        )


def _invitation(snapshot: Snapshot, row: dict[str, Any]) -> InvitationFile:
    """What is written for an invitation that the coordinator has accepted."""
    torch = ""
    with suppress(metadata.PackageNotFoundError):
        torch = release(metadata.version("torch"))
    guest = f"guest-{row['worker'].rpartition('-')[2]}"
    secret = keys.CurveKeys(keys.read(snapshot.directory)).secret(row["key"])
    return InvitationFile(
        snapshot.run_id, row["name"], guest, _address(snapshot),
        str(snapshot.run["control_key"]), secret, row["expires"], __version__, torch,
    )  # fmt: skip


def _address(snapshot: Snapshot) -> str:
    """Where the worker is to find the run."""
    job = of_stored(dict(read_job(snapshot.directory)))
    control = str(snapshot.run["control"])
    if addresses.host_of(control) == addresses.LOOPBACK and not job.network.address:
        console.warn(
            "the run listens on 127.0.0.1: only workers on this machine, or behind a tunnel to it, "
            "can join; address in [network] is where others reach it"
        )
    return addresses.of_guests(job, control)


def _readers_key(snapshot: Snapshot) -> ReaderKey:
    """Raises DlctlError if the connections of this run have no keys."""
    from dlctl.roles.protocol.authz import READER  # imported late: it pulls in numpy

    coordinator, address = snapshot.run.get("control_key"), snapshot.run.get("control")
    if not coordinator or not isinstance(address, str):
        raise DlctlError(
            f"the connections of {snapshot.run_id} have no keys: only you can reach it",
            where=str(snapshot.directory),
            hint='set transport = "tcp" in [network] and start the run; for guests also max in '
            "[workers], larger than count",
        )
    secret = keys.CurveKeys(keys.read(snapshot.directory)).secret(READER)
    return ReaderKey(snapshot.run_id, address, coordinator, secret)


def _who() -> str:
    """The user and host, as in "alice@host"."""
    with suppress(KeyError):
        return f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
    return f"uid {os.getuid()}@{socket.gethostname()}"


def _renew(snapshot: Snapshot) -> None:
    """Replace the key file only: no process has a key derived from the old one."""
    directory = snapshot.directory
    with lock.claimed(directory):
        lock.refuse_unknown_coordinator(snapshot)
        if left := stop.living(snapshot):
            names = ", ".join(str(row["name"]) for row in left)
            raise DlctlError(
                f"{snapshot.run_id} is {snapshot.state}, but processes of it still run: {names}",
                where=str(directory),
                hint=next_step.command(snapshot),
            )
        with explained(directory):
            keys.renew(directory)
            with closing(RunDb(directory)) as db:
                text = f"{_who()} gave the run a new key"
                db.add_event(time.time(), "keys", "", text, {})
                db.commit()
