"""`doctor` on this machine: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import socket

from stand_in_jobs import JOB

from dlctl.cli.commands import doctor
from dlctl.health.findings import FAULT, OK, WARNING, Finding
from dlctl.health.needs import HERE

NETWORK = '[network]\ntransport = "tcp"\nencryption = "none"\nport = {}\n'


def test_a_port_that_somebody_has_is_a_fault_and_its_owner_is_named(own_place, dlctl_command):
    (own_place / "train.py").write_text("task = None\n")
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        (own_place / "job.toml").write_text(JOB + NETWORK.format(port))
        code, out, err = dlctl_command("doctor", "job.toml", "--json")
    found = {row["subject"]: row for row in json.loads(out)["findings"]}
    assert {row["place"] for row in found.values()} == {HERE}
    assert found["coordinator"]["mark"] == FAULT
    assert f"pid {os.getpid()}: " in found["coordinator"]["found"]
    assert found["keys"]["mark"] == WARNING
    assert found["torch"]["mark"] == OK
    # The ports behind it are those of the servers: somebody else may have one just now.
    faults = {subject for subject, row in found.items() if row["mark"] == FAULT}
    assert {"coordinator"} <= faults <= {"coordinator", "server-0"}
    assert json.loads(out)["faults"] == len(faults)
    assert code == 1
    assert "dlctl doctor job.toml" in err
    assert not (own_place / "runs").exists()


def test_a_slurm_that_is_not_set_up_here_is_a_fault_though_the_address_is_given(
    own_place, dlctl_command, monkeypatch
):
    (own_place / "train.py").write_text("task = None\n")
    tools = own_place / "bin"
    tools.mkdir()
    (tools / "sinfo").write_text("#!/bin/sh\necho 'sinfo: fatal: no configuration' >&2\nexit 1\n")
    (tools / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    more = '[slurm]\nnodes = 2\n[network]\naddress = "127.0.0.1"\n'
    (own_place / "job.toml").write_text(JOB + more)
    rows = json.loads(dlctl_command("doctor", "job.toml", "--json").out)["findings"]
    (found,) = [row for row in rows if row["subject"] == "Slurm"]
    assert (found["mark"], "sinfo" in found["found"]) == (FAULT, True)
    assert "sinfo" in found["fix"]


def test_a_host_without_a_job_file_is_no_question(dlctl_command, own_place):
    code, _, err = dlctl_command("doctor", "--host", "h1")
    assert (code, "--host" in err) == (2, True)


def test_each_finding_has_a_mark_and_what_is_not_good_a_fix(golden):
    lines = doctor.lines(
        [
            Finding("h1", "clock", OK, "0.1 ms ahead of this machine"),
            Finding("h1", "cores", WARNING, "2", "fewer workers"),
            Finding("links", "h1 -> h2", FAULT, "refused\x1b[31m", "open port 7"),
        ]
    )
    golden("doctor", "\n".join(lines))
