"""How many workers a run takes and waits for, and who can join it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.errors import DlctlError
from dlctl.launch import addresses

JOB = """
[job]
name = "any"
script = "train.py"
stop = {{ steps = 9 }}

[algorithm]
name = "{method}"

[servers]
count = {servers}

[workers]
count = 2
{workers}

[network]
{network}
"""
OPEN = 'transport = "tcp"'
BEHIND_NAT = OPEN + '\naddress = "203.0.113.7"\nbind = "10.0.0.2"\nport = 7000'


def load(
    tmp_path: Path,
    workers: str,
    network: str = OPEN,
    method: str = "async-diloco",
    servers: int = 1,
) -> jobfile.JobFile:
    (tmp_path / "train.py").write_text("import dlctl\n")
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(workers=workers, network=network, method=method, servers=servers))
    return jobfile.load(file)


def test_behind_nat_it_listens_at_one_address_and_is_found_at_another(tmp_path: Path) -> None:
    job = load(tmp_path, "max = 4", BEHIND_NAT)
    control = addresses.of_coordinator("run", job).bind
    assert control == "tcp://10.0.0.2:7000"
    assert addresses.of_guests(job, control) == "tcp://203.0.113.7:7000"
    server = addresses.of_server("run", "server-1", job, "agent-0", control).bind
    assert server == "tcp://10.0.0.2:7002"
    assert addresses.as_dialled(server, "tcp://[::1]:7000") == "tcp://[::1]:7002"


def test_a_job_for_guests_says_how_many(tmp_path: Path) -> None:
    job = load(tmp_path, "min = 3\nmax = 4")
    assert job.takes_guests
    assert (job.workers.min, job.workers.max) == (3, 4)
    assert not load(tmp_path, "").takes_guests
    assert not load(tmp_path, "min = 1").takes_guests


@pytest.mark.parametrize(
    ("workers", "network", "method", "servers", "key"),
    [
        ("max = 1", OPEN, "async-diloco", 1, "workers.max"),
        ("min = 3", OPEN, "async-diloco", 1, "workers.min"),
        ("min = 5\nmax = 4", OPEN, "async-diloco", 1, "workers.min"),
        ("max = 4", "", "async-diloco", 1, "workers.max"),
        ("max = 4", OPEN + '\nencryption = "none"', "async-diloco", 1, "workers.max"),
        ("max = 4", OPEN, "gossip", 0, "workers.max"),
        ("max = 4", OPEN + "\nbind = '10.0.0.2'\nport = 7000", "async-diloco", 1, "network.bind"),
        ("max = 4", BEHIND_NAT.replace("port = 7000", ""), "async-diloco", 1, "network.bind"),
        ("", BEHIND_NAT, "async-diloco", 1, "network.bind"),
    ],
)
def test_what_nobody_could_join_is_a_fault_at_its_key(
    tmp_path: Path, workers: str, network: str, method: str, servers: int, key: str
) -> None:
    with pytest.raises(DlctlError) as refused:
        load(tmp_path, workers, network, method, servers)
    assert key in str(refused.value)
