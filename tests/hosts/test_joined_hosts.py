"""Workers that join a run from another host, which can only dial out."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workplace import Workplace

from .cluster import Cluster
from .jobs import LONG_S, daemons
from .network import LAB_ADDRESS

pytestmark = pytest.mark.root

SCRIPT = """
import threading
import torch
from torch import nn
from torch.utils.data import TensorDataset
import dlctl

torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(256, 2), torch.randn(256, 1))
with dlctl.attach(model, optimizer, evaluate=lambda model: {"fine": 1.0}) as run:
    for x, y in run.loader(data, 8):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(0.05)
        run.step(loss=loss)
"""
DIALS_OUT = """
table inet guest {
    chain input {
        type filter hook input priority 0; policy drop;
        ct state established,related accept
        iif lo accept
    }
}
"""
INSIDE = "10.98.0.1"
"""Where the run listens: no host has a route to it."""
PORT = 7100
FORWARDS = f"""
table ip router {{
    chain prerouting {{
        type nat hook prerouting priority -100;
        ip daddr {LAB_ADDRESS} tcp dport {PORT}-{PORT + 9} dnat to {INSIDE}
    }}
}}
"""
ADDRESS = f'address = "{LAB_ADDRESS}"\n'
BEHIND_NAT = ADDRESS + f'bind = "{INSIDE}"\nport = {PORT}\n'
GUEST = "root/guest"


@pytest.fixture(params=["as it is", pytest.param("behind NAT", marks=pytest.mark.long)])
def joined(
    cluster: Cluster, place: Workplace, request: pytest.FixtureRequest
) -> Iterator[Workplace]:
    """A run in the lab with one worker of its own; h1 only dials out, and bob is invited."""
    inside(cluster, "h1", "nft", "-f", "-", stdin=DIALS_OUT)
    network = ADDRESS
    if request.param == "behind NAT":
        network = BEHIND_NAT
        assert not cluster.run("ip", "addr", "add", f"{INSIDE}/32", "dev", "lo").returncode
        rules = place.path / "router.nft"
        rules.write_text(FORWARDS)
        done = cluster.run("nft", "-f", str(rules))
        assert not done.returncode, done.stderr
    place.task(SCRIPT)
    place.job(
        program='script = "train.py"', workers=1, stop="{ seconds = 600 }", servers=2,
        algorithm='name = "async-diloco"\nlocal_steps = 4', optimizer="", more_workers="max = 2",
        more=f'\n[network]\ntransport = "tcp"\n{network}\n[timeouts]\nsilent_s = 6.0\n',
    )  # fmt: skip
    place.start()
    invited = place.dlctl("keys", "invite", "bob")
    assert invited.code == 0, invited.err
    there = cluster.files("h1") / GUEST
    there.mkdir(parents=True)
    for name in ("bob.invite", "train.py"):
        (there / name).write_text((place.path / name).read_text())
        (there / name).chmod(0o600)
    yield place
    place.dlctl("stop", "--no-checkpoint")


def inside(cluster: Cluster, host: str, *argv: str, stdin: str = "") -> str:
    ended = subprocess.run(
        [*cluster.inside(host), *argv], input=stdin, capture_output=True, text=True,
        env=cluster.env, timeout=LONG_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def join(cluster: Cluster) -> subprocess.Popen[str]:
    """`dlctl join` on h1, by somebody who sits there."""
    words = [
        cluster.python, "-P", "-m", "dlctl", "join", "--invite", "bob.invite",
        "--", cluster.python, "train.py",
    ]  # fmt: skip
    line = f"cd /{GUEST} && exec {shlex.join(words)}"
    return subprocess.Popen(
        [*cluster.login("h1"), "HOME=/root", "sh", "-c", line], stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=cluster.env,
    )  # fmt: skip


def row(place: Workplace) -> dict[str, Any]:
    return place.daemon("worker-1")


def until_training(place: Workplace, after: int = 0) -> int:
    def trains() -> bool:
        worker = row(place)
        has_steps = (worker.get("metrics") or {}).get("step", 0) > 0
        return worker.get("state") == "running" and worker["incarnation"] > after and has_steps

    place.until("worker-1 trains", trains, LONG_S)
    return int(row(place)["incarnation"])


def kill(cluster: Cluster, module: str, number: int = signal.SIGKILL) -> None:
    for process in cluster.processes("h1"):
        if module in process.cmdline():
            process.send_signal(number)


@pytest.mark.long
def test_a_host_that_only_dials_out_joins_is_killed_returns_and_is_revoked(
    cluster: Cluster, joined: Workplace
) -> None:
    place = joined
    guest = join(cluster)
    first = until_training(place)
    assert all(each.port == 22 for each in cluster.listening("h1"))
    kill(cluster, "daemons.script")
    second = until_training(place, first)
    kill(cluster, "daemons.guest")
    guest.communicate(timeout=LONG_S)
    place.until("it is gone", lambda: not row(place), LONG_S)
    guest = join(cluster)
    until_training(place, second)
    assert place.dlctl("keys", "revoke", "bob").code == 0
    revoked_at = time.monotonic()
    place.until("it is out", lambda: not row(place), 5.0)
    print(f"out {time.monotonic() - revoked_at:.2f} s after the command")
    assert guest.wait(LONG_S) == 75
    guest.communicate()
    assert not daemons(cluster, "h1")
    step = place.run()["step"]
    place.until_step(step + 20)
    assert place.dlctl("stop").code == 0
    verified = json.loads(place.dlctl("verify", "--json").out)
    assert verified["lost"] == 0
    assert verified["acknowledged"] > 0


@pytest.mark.long
@pytest.mark.parametrize("joined", ["as it is"], indirect=True)
@pytest.mark.parametrize("offset_s", [pytest.param(-3600, marks=pytest.mark.long), 3600])
def test_another_version_is_refused_by_name_and_a_clock_that_is_an_hour_wrong_does_not_matter(
    cluster: Cluster, joined: Workplace, offset_s: int
) -> None:
    """Not even if the invitation has expired by this clock: the run judges by its own."""
    file = Path(cluster.files("h1") / GUEST / "bob.invite")
    made = json.loads(file.read_text())
    for package in ("dlctl", "torch"):
        file.write_text(json.dumps(made | {package: "0.0.1"}))
        guest = join(cluster)
        out, _ = guest.communicate(timeout=LONG_S)
        assert guest.returncode == 9, out
        assert "0.0.1" in out
    assert joined.run()["state"] == "running"
    file.write_text(json.dumps(made | {"expires": time.time() + 1800}))
    cluster.fake_clock("h1", offset_s)
    preload = (cluster.files("h1") / "etc/ld.so.preload").read_text()
    assert preload.strip()
    guest = join(cluster)
    until_training(joined)
    assert all(each.port == 22 for each in cluster.listening("h1")), "it only dials out"
    kill(cluster, "daemons.guest", signal.SIGTERM)
    guest.communicate(timeout=LONG_S)
    assert guest.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("joined", ["as it is"], indirect=True)
def test_a_guest_stays_while_the_coordinator_is_replaced(
    cluster: Cluster, joined: Workplace
) -> None:
    guest = join(cluster)
    until_training(joined)
    os.kill(joined.pid("coordinator"), signal.SIGKILL)
    joined.until_step(joined.run()["step"] + 20, LONG_S)
    joined.until("it trains", lambda: row(joined).get("state") == "running", LONG_S)
    assert guest.poll() is None
    kill(cluster, "daemons.guest", signal.SIGTERM)
    guest.communicate(timeout=LONG_S)
    assert guest.returncode == 0
