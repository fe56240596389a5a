"""Split learning whose parties are hosts: each has its own files and keys, and the head's sees no
sample, no label and no weight of the clients.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from split_parties import RECORDING, exported, has, loaded, received, write
from workplace import Workplace

from daemons.worker.replica import seed_all
from dlctl.control import keys

from .cluster import Cluster
from .jobs import LONG_S, daemons, kill

pytestmark = [pytest.mark.root, pytest.mark.long, pytest.mark.timeout(300)]
HOSTS = '[[hosts]]\nssh = "h1"\n[[hosts]]\nssh = "h2"\n'
WARD = """
[[parties]]
name = "ward"
role = "client"
task = "ward/train.py:task"
host = "h2"
"""
REGION_BYTES_MAX = 1 << 25
OF_HOSTS = {"h1": {"server-1", "worker-2"}, "h2": {"worker-1"}}


def write_parties(place: Workplace, shape: str) -> None:
    """The clinic here, the lab on h1, where its messages are recorded, the ward on h2."""
    write(place, f'shape = "{shape}"', clients=1, pause_s=0.15)
    (place.path / "ward").mkdir()
    (place.path / "ward/train.py").write_text((place.path / "clinic/train.py").read_text())
    lab = place.path / "lab/train.py"
    lab.write_text(RECORDING.replace('FOLDER = ""', 'FOLDER = "/tmp"') + lab.read_text())
    file = place.path / "job.toml"
    clients, head, of_head = file.read_text().partition('[[parties]]\nname = "lab"')
    of_head = of_head.replace('host = "local"', 'host = "h1"')
    file.write_text(HOSTS + clients + WARD + head + of_head)


def secrets_on(cluster: Cluster, host: str, secrets: dict[str, str]) -> set[str]:
    """Whose secrets are in a file of the run's there, or in the memory of a process."""
    root = cluster.files(host) / "root/.local/state/dlctl"
    found = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    for process in cluster.processes(host):
        found += memory_of(process)
    return {
        name for name, secret in secrets.items() if any(secret.encode() in text for text in found)
    }


def memory_of(process: psutil.Process) -> list[bytes]:
    """What it can write to, but for files and large arrays; [] if it has ended."""
    found = []
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        with Path(f"/proc/{process.pid}/mem").open("rb", buffering=0) as memory:
            for line in maps:
                place, access, _, _, inode, *_ = line.split()
                lo, hi = (int(end, 16) for end in place.split("-"))
                if access.startswith("rw") and inode == "0" and hi - lo < REGION_BYTES_MAX:
                    memory.seek(lo)
                    found.append(memory.read(hi - lo))
    except OSError:
        pass
    return found


def check_apart(cluster: Cluster, place: Workplace) -> None:
    """Each host has its own party's code and secrets, and no other's."""
    ring = keys.keyring(place.directory, True)
    names = ["coordinator", "agent-0", "agent-1", "agent-2"]
    names += ["server-0", "server-1", "worker-0", "worker-1", "worker-2"]
    secrets = {name: ring.secret(name) for name in names}
    for host, party in (("h1", "lab"), ("h2", "ward")):
        root = cluster.files(host) / "root/.local/state/dlctl"
        assert {path.parent.name for path in root.rglob("train.py")} == {party}
    for host, agent in (("h1", "agent-1"), ("h2", "agent-2")):
        found = secrets_on(cluster, host, secrets)
        assert found, "this is how a secret is found"
        assert found <= {agent, *OF_HOSTS[host]}


@pytest.mark.parametrize("shape", ["u", "vanilla"])
def test_the_host_of_the_head_sees_no_sample_no_label_and_no_weight_of_clients(
    cluster: Cluster, place: Workplace, shape: str
) -> None:
    write_parties(place, shape)
    run = place.begin("run", "job.toml")
    place.until_step(4, 2 * LONG_S)
    agents = {"agent-1", "agent-2"}  # Their templates, too.
    assert {host: {*daemons(cluster, host)} - agents for host in OF_HOSTS} == OF_HOSTS
    check_apart(cluster, place)
    kill(cluster, "h2", "worker-1")
    kill(cluster, "h1", "worker-2")
    ended = run.end(2 * LONG_S)
    assert place.run()["state"] == "finished", ended.err
    messages = [*received(cluster.files("h1") / "tmp")]
    assert {"PeerRequest", "Parameters"} <= {kind for kind, _ in messages}
    arrays = [array for _, array in messages]
    check_seen(place, arrays, shape)


def check_seen(place: Workplace, arrays: list, shape: str) -> None:
    clinic = loaded(Path(place.path / "clinic" / "train.py"))
    seed_all(0)
    first = clinic.task.client_model()
    cut = first(clinic.X[:8]).detach().numpy()
    assert any(has(array, cut[0]) for array in arrays), "the recording has what is sent"
    assert not any(has(array, row) for array in arrays for row in clinic.X.numpy()[::16])
    labels = clinic.Y.numpy()[:8]
    assert any(has(array, labels) for array in arrays) == (shape == "vanilla")
    weights = [first[0].weight.detach().numpy()[0]]
    weights += [
        value[0] for name, value in exported(place).items() if name.startswith("client.0.w")
    ]
    assert len(weights) == 2
    assert not any(has(array, weight) for array in arrays for weight in weights)
