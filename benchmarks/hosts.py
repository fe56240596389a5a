"""`dlctl start` on three hosts over ssh, against the same start on one machine.

The hosts are network namespaces of this machine with an sshd each, so that both starts have the
same cores. The time of concurrent ssh logins to all three is measured and subtracted: dlctl cannot
shorten it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from benchmarks.figures import Figure, ratio, timed
from benchmarks.sandbox import Dlctl, sandbox, write_job
from tests.hosts.cluster import Cluster, missing

SERVERS, WORKERS = 2, 4
WHAT = f"start, {SERVERS} servers + {WORKERS} workers, 3 hosts without the login / 1 machine"
ASKED = 2.0
PLAIN = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
"""A new connection, as dlctl's first one is."""


def measure(*, quick: bool) -> list[Figure]:
    if why := missing():
        return [Figure("hosts", WHAT, "x", (), ASKED, skipped=why)]
    here_s, there_s = [], []
    with sandbox() as directory, Cluster() as cluster:
        dlctl = Dlctl(cluster.enter, cluster.env)
        (directory / "three").mkdir()
        hosts = "".join(f'[[hosts]]\nssh = "{name}"\n' for name in cluster.names)
        one = write_job(directory, servers=SERVERS, workers=WORKERS)
        three = write_job(directory / "three", servers=SERVERS, workers=WORKERS, more=hosts)
        for _ in range(1 if quick else 7):
            with dlctl.running(one) as took_s:
                here_s.append(took_s)
            login_s = timed(lambda: _log_in(cluster))
            with dlctl.running(three) as took_s:
                there_s.append(took_s - login_s)
    return [ratio("hosts", WHAT, there_s, here_s, ASKED)]


def _log_in(cluster: Cluster) -> None:
    """Waits until all have answered."""
    with ThreadPoolExecutor(len(cluster.names)) as pool:
        command = ("ssh", *PLAIN, "-o", "BatchMode=yes")
        calls = [pool.submit(cluster.run, *command, name, "true") for name in cluster.names]
        if any(call.result().returncode for call in calls):
            raise RuntimeError("a host of the cluster cannot be reached")
