"""Slurm's daemons in the lab and on the hosts of `tests/hosts`.

One munged serves all: its socket lies in the directory that they share. Nothing of it touches the
machine's own files, and all of it ends with the cluster, also if the test is killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import psutil
from hosts import cluster as hosts
from hosts.cluster import Cluster
from hosts.waiting import until

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
PARTITION = "dl"
KEEPER = "daemons.node.keep"
CONF = """ClusterName=lab
SlurmctldHost=lab({controller})
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir=/run/slurmd.spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=6
JobRequeue=1
SlurmdTimeout=10
MinJobAge=300
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=dl Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""
NODE = "NodeName={name} NodeAddr={address} NodeHostname={name} CPUs=4 RealMemory=1000 State=UNKNOWN"
UP_S = 30.0


def missing() -> str:
    """Why there can be no Slurm here; "" if there can."""
    path = f"{os.environ.get('PATH', '')}:{hosts.SBIN}"
    if absent := [tool for tool in TOOLS if not shutil.which(tool, path=path)]:
        return f"not here: {', '.join(absent)} (slurmctld, slurmd, slurm-client, munge)"
    return hosts.missing()


class _Sharing(Cluster):
    """A cluster that has one directory in common; it goes with the cluster, however that ends."""

    def _start(self) -> None:
        self.directory.chmod(0o711)
        self.shared = self.directory / "shared"
        self.shared.mkdir(0o755)
        self._shared = [self.shared]
        super()._start()


class SlurmCluster:
    """Up with `with`; the nodes are h1, h2 ... with 4 processors each, by Slurm's own counting."""

    def __init__(self, nodes: int = 3) -> None:
        self.cluster = _Sharing(nodes)
        self._lost: set[str] = set()

    def __enter__(self) -> SlurmCluster:
        try:
            self.cluster.__enter__()
            self.directory = self.cluster.shared
            """The same on all nodes and in the lab, as on a file server."""
            self.cluster.env |= {"SLURM_CONF": str(self.directory / "slurm.conf")}
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.cluster.close()

    def _start(self) -> None:
        (self.directory / "state").mkdir()
        (self.directory / "slurm.conf").write_text(self._conf())
        key = self.directory / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._must("munged", *self._munge_files())
        self.start_controller()
        for name in self.cluster.names:
            self.start_node(name)
        until("all nodes are idle", self._are_idle, UP_S)

    def _conf(self) -> str:
        addresses = {name: self.cluster.address(name) for name in self.cluster.names}
        nodes = "\n".join(NODE.format(name=n, address=a) for n, a in addresses.items())
        controller = self.cluster.address(hosts.LAB)
        return CONF.format(directory=self.directory, nodes=nodes, controller=controller)

    def _munge_files(self) -> list[str]:
        d = self.directory
        kinds = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        seed = f"--seed-file={d}/munge.seed"
        return [f"--{option}={d}/munge.{kind}" for option, kind in kinds.items()] + [seed]

    def _must(self, *argv: str) -> None:
        ended = self.run(*argv)
        assert ended.returncode == 0, f"{argv[0]}: {ended.stderr}"

    def _are_idle(self) -> bool:
        said = self.run("sinfo", "-h", "-N", "-p", PARTITION, "-o", "%T").stdout.split()
        return said == ["idle"] * len(self.cluster.names)

    # ------------------------------------------------------------ what is there

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the lab, where the user is, to its end."""
        return self.cluster.run(*argv)

    def jobs(self) -> list[str]:
        """Their numbers, of those that wait, run or are just ending."""
        return self.run("squeue", "-h", "-o", "%i").stdout.split()

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        said = self.run("scontrol", "-o", "show", "job", job).stdout.split()
        return {key: value for key, _, value in (word.partition("=") for word in said)}

    def processes(self, node: str) -> list[psutil.Process]:
        """Of a node, none of Slurm's own daemon."""
        found = self.cluster.processes(node)
        return [process for process in found if process.name() != "slurmd"]

    # ------------------------------------------------------------ nodes

    def start_controller(self) -> None:
        self._must("slurmctld")

    def start_node(self, name: str) -> None:
        conf = self.directory / "slurm.conf"
        ended = self.cluster.ssh(name, f"SLURM_CONF={conf} slurmd -N {name} </dev/null >/dev/null")
        assert ended.returncode == 0, ended.stderr

    def lose(self, name: str) -> None:
        """The node loses its power for good."""
        self.cluster.lose(name)
        self._lost.add(name)

    def living(self) -> list[str]:
        return [name for name in self.cluster.names if name not in self._lost]

    # ------------------------------------------------------------ dlctl there

    def section(self, nodes: int = 3, **more: str) -> str:
        """For a job file; values as TOML."""
        keys = {"nodes": str(nodes), "dir": f'"{self.directory}/orders"', **more}
        return "\n".join(
            [
                "[launcher]",
                'name = "slurm"',
                *(f"{key} = {value}" for key, value in keys.items()),
                "",
            ]
        )

    def daemons(self, node: str) -> list[str]:
        """Names of the daemons that live on a node; its keeper is one of them."""
        words = [process.cmdline() for process in self.cluster.processes(node)]
        ours = [w for w in words if "daemons." in " ".join(w[:4])]
        return sorted(w[3] if len(w) <= 5 or w[3] == KEEPER else w[-3] for w in ours)

    def files(self, node: str) -> list[str]:
        """What of dlctl's is there."""
        root = self.cluster.files(node)
        found = [
            *(root / f"tmp/dlctl-slurm-{os.getuid()}").rglob("*"),
            *(root / "dev/shm").rglob("*"),
        ]
        return [str(file) for file in found if file.is_file()]

    def orders(self) -> list[Path]:
        """All that is in the directory that the coordinator and the keepers share."""
        return [*(self.directory / "orders").glob("*"), *(self.directory / "orders").glob("*/*")]
