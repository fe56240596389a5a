"""A job as a manifest of Kubernetes: a template, filled. Nothing is sent to a cluster.

A pod has the coordinator, the servers and the workers that the job itself starts; each of the other
workers, up to `max` of [workers], is a pod that joins with an invitation (`pod.py` is what both
run). So the job trains a program with a loop of its own, which is in the image.
"""

from __future__ import annotations

import json
import math
import re
import string
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dlctl import __version__
from dlctl.control import prepared
from dlctl.errors import UsageError
from dlctl.jobfile.rewriting import rewritten
from dlctl.ops.cases import Start
from dlctl.stores import addresses
from dlctl.util import regular

TEMPLATE = Path(__file__).with_suffix(".yaml")
LOCAL = "local"
STATE = "/state"
MOUNTS = STATE, "/run/dlctl", "/home/dlctl", "/tmp", "/dev/shm"
"""The pods' volumes."""
PORT = 7100
"""Of the coordinator, unless the job has one; the servers have the ports behind it."""
NAME_MAX = 40
"""What is put behind the name, "-workers-1000-abcde", has to fit into a DNS label of 63."""
WORKERS_MAX = 1000
SAVE_S = 30
"""For the last checkpoint, behind the workers' grace."""
_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(
    r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(m|k|[KMGTPE]i|[MGTPE])?", re.ASCII)
_IMAGE = re.compile(r"[a-z0-9][\w.:/@-]{0,500}", re.ASCII | re.IGNORECASE)
_PATH = re.compile(r"(?:/[\w.-]+)+", re.ASCII)
_FILE = re.compile(r"[\w.-]+", re.ASCII)
_CONDITION = "#: "
_END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the job file does not say."""

    image: str
    """Has dlctl, torch and the files of the job."""
    path: str = "/job"
    """Where the directory of the job file is in the image."""
    name: str = ""
    """Of all objects; "": that of the job."""
    namespace: str = "default"
    workers: int | None = None
    """Pods of workers; None: as many as may join."""
    cpu: str = "1"
    memory: str = "4Gi"
    gpus: int = 0
    """Of each worker, that of the control pod included."""
    control_cpu: str = "2"
    control_memory: str = "8Gi"
    storage: str = "20Gi"
    storage_class: str = ""
    env_from: str = ""
    """A Secret whose keys are environment variables: the credentials of a store."""
    hours: float = 720.0
    """How long the invitations are valid."""


def manifest(start: Start, options: Options) -> str:
    """The manifest, in YAML, with the keys of a new run. Raises UsageError."""
    count = _check_job(start, options)
    name = options.name or start.job.job.name
    _check_options(options, name)
    if not _FILE.fullmatch(start.file.name):
        raise UsageError(
            "the name of a job file in a pod is of letters, digits, dot, dash and underscore",
            where=str(start.file),
            hint="rename the job file",
        )
    job, port = start.job, start.job.network.port or PORT
    expires = time.time() + options.hours * 3600.0
    made = prepared.prepare(job.job.name, job.workers.count, count, expires)
    address = f"{name}.{options.namespace}.svc"
    invited = made.invitations(f"tcp://{address}:{port}")
    listening = [("coordinator", port)]
    listening += [(f"server-{k}", port + 1 + k) for k in range(job.servers.count)]
    flags = {
        "disk": job.servers.durability == "disk",
        "no_disk": job.servers.durability != "disk",
        "storage_class": bool(options.storage_class),
        "env_from": bool(options.env_from),
    }
    values = {
        "name": name, "namespace": options.namespace, "run": made.run, "version": __version__,
        "job": _yaml(_job_text(start, f"{name}-control", address, port)),
        "prepared": _yaml(made.to_bytes().decode()),
        "invitations": _yaml(
            {f"{index}.invite": each.to_bytes().decode() for index, each in enumerate(invited)}
        ),
        "ports": _yaml([{"name": n, "port": p, "targetPort": p} for n, p in listening]),
        "container_ports": _yaml([{"name": n, "containerPort": p} for n, p in listening]),
        "port": port, "last_port": port + job.servers.count, "count": count,
        "image": options.image, "path": options.path, "file": start.file.name,
        "grace": round(job.timeouts.grace_s) + SAVE_S,
        "cpu": _yaml(options.cpu), "memory": _yaml(options.memory),
        "control_cpu": _yaml(options.control_cpu),
        "control_memory": _yaml(options.control_memory),
        "gpus": f", nvidia.com/gpu: {options.gpus}" if options.gpus else "",
        "storage": _yaml(options.storage), "storage_class": options.storage_class,
        "env_from": options.env_from, "worker_args": _yaml(_worker_args(start)),
    }  # fmt: skip
    return string.Template(_chosen(regular.read_bytes(TEMPLATE).decode(), flags)).substitute(values)


def _chosen(text: str, flags: dict[str, bool]) -> str:
    """The lines of the template whose conditions hold, without those that state them."""
    lines: list[str] = []
    holds = [True]
    for line in text.splitlines(keepends=True):
        condition = line.strip().removeprefix(_CONDITION)
        if not line.lstrip().startswith(_CONDITION):
            lines += [line] if all(holds) else []
        elif condition == _END:
            holds.pop()
        else:
            holds.append(flags[condition])
    return "".join(lines)


def _yaml(value: Any) -> str:
    """In YAML, on one line. JSON writes a letter beyond 16 bits as two: not YAML."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", text)


def _job_text(start: Start, host: str, address: str, port: int) -> str:
    """The job file of the pod: it listens at its own address, and is reached at the Service's."""
    changes: dict[str, Any] = {
        "job.run_dir": f"{STATE}/runs",
        "network.transport": "tcp", "network.encryption": "curve",
        "network.address": address, "network.bind": host, "network.port": port,
    }  # fmt: skip
    text = regular.read_bytes(start.file).decode()
    return rewritten(text, changes)


def _worker_args(start: Start) -> list[str]:
    job = start.job
    program = [*("-m", job.job.module)] if job.job.module else [_beside(start, job.job.script)]
    python = ["python"]
    if job.workers.processes > 1:
        python = ["torchrun", "--standalone", "--nproc-per-node", str(job.workers.processes)]
    joins = ["python", "-P", "-m", "dlctl.ops.kubernetes.pod", "join", "/run/dlctl", "--"]
    # Kubernetes puts a variable of the environment in the place of "$(NAME)", and "$" in that of
    # "$$", wherever that is.
    words = [text.replace("$", "$$") for text in (*program, *job.job.args)]
    return [*joins, *python, *words]


def _beside(start: Start, file: str) -> str:
    """The path of a file, relative to the directory of the job file. Raises UsageError."""
    home = start.file.parent.resolve()
    try:
        return str(PurePosixPath(Path(file).resolve().relative_to(home)))
    except ValueError:
        raise UsageError(
            "the image has the directory of the job file, and this file is outside of it",
            where=file,
            hint=f"move it below {home}, or the job file above it",
        ) from None


# ---------------------------------------------------------------- what is refused


def _check_job(start: Start, options: Options) -> int:
    """The number of worker pods. Raises UsageError for a job whose workers cannot be pods."""
    job, where = start.job, str(start.file)
    if not job.has_loop:
        what = "this job trains a task, and a worker that joins runs a program with a loop"
        raise UsageError(
            what, where=where, hint="use script or module in [job]: dlctl init --script shows how"
        )
    if job.has_other_hosts or job.launcher.name != LOCAL:
        raise UsageError(
            "this job has a launcher or hosts of its own, and Kubernetes is what starts pods",
            where=where,
            hint="remove [[hosts]] and [launcher] from the job file",
        )
    room = (job.workers.max or job.workers.count) - job.workers.count
    if room < 1:
        raise UsageError(
            f"no worker can join this job: it takes {job.workers.count}, which it starts itself",
            where=where,
            hint="in [workers] set count = 1, for the control pod, and max above it; in [network] "
            'set transport = "tcp"',
        )
    _beside(start, job.job.file)
    if job.job.weights and not addresses.is_like(job.job.weights):
        _beside(start, job.job.weights)
    mirror = job.checkpoints.mirror
    if mirror and addresses.parse(mirror).scheme == addresses.FILE:
        raise UsageError(
            f"the mirror {mirror} is a directory of this machine, which no pod has",
            where=where,
            hint='set mirror in [checkpoints] to "s3://..." or "gs://..."',
        )
    count = room if options.workers is None else options.workers
    if not 1 <= count <= min(room, WORKERS_MAX):
        raise UsageError(
            f"--workers {count}: from 1 to {min(room, WORKERS_MAX)} workers can join this job",
            where=where,
            hint="raise max in [workers]" if count > 1 else "use at least one",
        )
    return count


def _check_options(options: Options, name: str) -> None:
    """Raises UsageError for what Kubernetes would not accept."""
    if not _LABEL.fullmatch(name) or len(name) > NAME_MAX:
        raise UsageError(
            f'"{name:.80}" cannot be the name of objects: it has to be a DNS label, of small '
            f"letters, digits and dashes, which begins with a letter, up to {NAME_MAX} long",
            hint="choose one with --name",
        )
    if not _LABEL.fullmatch(options.namespace) or len(options.namespace) > 63:
        raise UsageError(
            f'"{options.namespace:.80}" is not a namespace: small letters, digits and dashes',
            hint="kubectl get namespaces",
        )
    for option in ("storage_class", "env_from"):
        text = getattr(options, option)
        if text and not _SUBDOMAIN.fullmatch(text):
            flag = option.replace("_", "-")
            raise UsageError(f'--{flag}: "{text:.80}" is not a name of Kubernetes')
    for option in ("cpu", "memory", "control_cpu", "control_memory", "storage"):
        _check_quantity(option, getattr(options, option))
    if not _IMAGE.fullmatch(options.image):
        raise UsageError(
            f'"{options.image:.200}" is not the name of an image', hint="as in --image me/digits:1"
        )
    parts = options.path.split("/")
    if not _PATH.fullmatch(options.path) or {".", ".."} & {*parts}:
        raise UsageError(f'--path: "{options.path:.200}" is not a full path', hint="as in /job")
    if hidden := [mount for mount in MOUNTS if f"{options.path}/".startswith(f"{mount}/")]:
        raise UsageError(
            f"--path {options.path}: {hidden[0]} is a volume of the pod, which hides the image's",
            hint="copy the job's files to another directory of the image, such as /job",
        )
    if not math.isfinite(options.hours):
        raise UsageError(f"--hours: {options.hours} is not a time", hint="as in --hours 720")


def _check_quantity(option: str, text: str) -> None:
    found = _QUANTITY.fullmatch(text)
    is_cpu = option.endswith("cpu")
    if found is None or not float(found[1]) or (found[2] == "m") != (is_cpu and bool(found[2])):
        example = '"2" or "500m"' if is_cpu else '"4Gi" or "500Mi"'
        raise UsageError(
            f'--{option.replace("_", "-")}: "{text:.80}" is not a quantity of Kubernetes',
            hint=f"as in {example}",
        )
