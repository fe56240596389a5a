"""Jobs on the hosts of a cluster, and what of them is there."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from workplace import Workplace

from .cluster import Cluster

HOSTS = "".join(f'[[hosts]]\nssh = "{name}"\n' for name in ("h1", "h2", "h3"))
ENDLESS = "{ steps = 100000000 }"
SLOW_S = 0.05
LONG_S = 60.0
EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits"
LOOP = EXAMPLES / "own_loop"
LOOP_PAUSE = """            import os
            from time import sleep
            sleep(0.0 if os.path.exists("/tmp/hurry") else 0.2)
"""
PAUSE = """        import os
        from time import sleep
        sleep(0.0 if os.path.exists("/tmp/hurry") else 0.5)
"""
DIGITS_JOB = """[job]
name = "digits"
task = "train.py:task"
stop = {{ epochs = 10 }}
[algorithm]
name = "{method}"
[{optimizer}]
name = "adamw"
lr = 0.003
[servers]
count = {servers}
[workers]
count = 3
batch_size = 16
threads = 1
{more}
"""


def daemons(cluster: Cluster, host: str) -> list[str]:
    """Names of the daemons that live on a host."""
    words = [process.cmdline() for process in cluster.processes(host)]
    return sorted(w[5] for w in words if len(w) > 5 and w[3].startswith("daemons."))


def host_files(cluster: Cluster, host: str) -> list[str]:
    """What of dlctl's is there."""
    root = cluster.files(host)
    places = (root / "root/.local/state/dlctl", root / "dev/shm")
    return [str(f) for place in places if place.exists() for f in place.rglob("*") if f.is_file()]


def kill(cluster: Cluster, host: str, daemon: str, *, may_be_gone: bool = False) -> None:
    for process in cluster.processes(host):
        words = process.cmdline()
        is_it = len(words) > 5 and words[5] == daemon
        if is_it and not words[3].endswith(("print_reader", "template")):
            process.send_signal(signal.SIGKILL)
            return
    assert may_be_gone, f"no {daemon} on {host}"


def until_moved(place: Workplace) -> None:
    """The worker of h3, which is lost, works elsewhere, and the run goes on."""
    place.until(
        "its worker is elsewhere", lambda: place.daemon("worker-2")["agent"] != "agent-3", LONG_S
    )
    place.until("it works", lambda: place.daemon("worker-2")["state"] == "running", LONG_S)
    place.until_step(place.run()["step"] + 20)


def begin(place: Workplace, hosts: str = HOSTS, checkpoint_every_s: float = 0.0) -> None:
    """A job without an end on these hosts, at work."""
    place.task(pause_s=SLOW_S)
    place.job(
        stop=ENDLESS, servers=2, workers=3, checkpoint_every_s=checkpoint_every_s, more=hosts
    )  # fmt: skip
    place.start()


def digits_on_hosts(cluster: Cluster) -> str:
    """The task of the digits example, with its data where every host has it."""
    for name in cluster.names:
        data = (DIGITS / "digits.npz").read_bytes()
        (cluster.files(name) / "tmp/digits.npz").write_bytes(data)
    text = (DIGITS / "train.py").read_text()
    beside = 'Path(__file__).parent / "digits.npz"'
    assert beside in text
    return text.replace(beside, '"/tmp/digits.npz"')


def write_digits(
    cluster: Cluster, place: Workplace, method: str, more: str, servers: int = 0
) -> None:
    """The digits example with three workers, which takes minutes until `hurry`.

    With servers these have the optimiser, else the replicas.
    """
    text = digits_on_hosts(cluster)
    begin = "        images, labels = batch\n"
    assert begin in text
    (place.path / "train.py").write_text(text.replace(begin, PAUSE + begin))
    optimizer = "optimizer" if servers else "inner"
    job = DIGITS_JOB.format(method=method, more=more, servers=servers, optimizer=optimizer)
    (place.path / "job.toml").write_text(job)


def write_loop(place: Workplace, workers: int, more: str, stop: str = "{ epochs = 40 }") -> None:
    """The example with a training loop of its own, which takes minutes until `hurry`."""
    text = (LOOP / "train.py").read_text()
    begin = "            loss.backward()\n"
    assert begin in text
    (place.path / "train.py").write_text(text.replace(begin, LOOP_PAUSE + begin))
    job = (LOOP / "job.toml").read_text()
    for old, new in (("{ seconds = 300 }", stop), ("count = 2\n", f"count = {workers}\n")):
        assert old in job
        job = job.replace(old, new)
    (place.path / "job.toml").write_text(f"{job}\n{more}")


def hurry(cluster: Cluster, hosts: Iterable[str]) -> None:
    """Whatever should happen meanwhile has happened: learn the digits without pauses."""
    for host in hosts:
        (cluster.files(host) / "tmp/hurry").touch()
