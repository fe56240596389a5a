"""`dlctl kubernetes`: a job as a manifest."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import click

from dlctl.cli.group import make_command
from dlctl.cli.options import PATH, file_argument
from dlctl.cli.ui import console
from dlctl.util import outfile

PRIVATE, OTHERS = 0o600, 0o077


@make_command(
    "dlctl kubernetes --image me/digits:1 job.toml -o run.yaml  # write it",
    "kubectl create -f run.yaml  # begin; kubectl logs -f job/digits-control",
    "dlctl kubernetes --image me/digits:1 --workers 8 --gpus 1 job.toml -o run.yaml  # on GPUs",
)
@file_argument
@click.option(
    "-o", "--output", type=PATH,
    help="Write it there, readable for its owner alone.  [default: standard output]",
)  # fmt: skip
@click.option("--image", required=True, help="Has dlctl, torch and the files of the job.")
@click.option(
    "--path", default="/job", show_default=True,
    help="Where the directory of the job file is in the image.",
)  # fmt: skip
@click.option("--name", default="", help="Of all objects.  [default: the name of the job]")
@click.option("-n", "--namespace", default="default", show_default=True)
@click.option(
    "--workers", type=int,
    help="Pods of workers, each with one.  [default: max - count of the job's workers]",
)  # fmt: skip
@click.option("--cpu", default="1", show_default=True, help="Requested by a worker's pod.")
@click.option("--memory", default="4Gi", show_default=True, help="Limit of a worker's pod.")
@click.option(
    "--gpus", type=click.IntRange(0, 64), default=0, show_default=True,
    help="nvidia.com/gpu of each pod, that of worker-0 included.",
)  # fmt: skip
@click.option("--control-cpu", default="2", show_default=True, help="Of the control pod.")
@click.option("--control-memory", default="8Gi", show_default=True, help="Of the control pod.")
@click.option(
    "--storage", default="20Gi", show_default=True,
    help='Of the volume for durability = "disk": shards, checkpoints and logs.',
)  # fmt: skip
@click.option("--storage-class", default="", help="Of that volume.  [default: the cluster's]")
@click.option(
    "--env-from", default="",
    help="A Secret whose keys become environment variables, as AWS_ACCESS_KEY_ID for a mirror.",
)  # fmt: skip
@click.option(
    "--hours", type=click.FloatRange(0.01, 24 * 365), default=720.0, show_default=True,
    help="How long the workers' invitations are valid.",
)  # fmt: skip
def command(file: Path, output: Path | None, **options: object) -> None:
    """Write a manifest for Kubernetes, 1.29 or later. Nothing is sent to a cluster.

    The control pod has the coordinator, the servers and the workers that the job itself starts
    (count of [workers], at least one: it builds the model). Each further worker is a pod of an
    Indexed Job that joins with an invitation: it may be evicted at any time, comes again, and the
    others train on. With durability = "disk" in [servers] the control pod may be evicted, too: the
    next one goes on where it was. Otherwise the run ends with it.

    The job needs script or module in [job], room for workers that join (max in [workers]), and
    transport = "tcp" in [network]; address and ports are filled in. The image has to have the same
    version of dlctl as this machine. The manifest has the keys of the run: -o gives it mode
    0600, and standard output has that of your shell. Make a new one for each run. Each manifest is
    a run of its own.
    """
    # Imported late: they pull in pydantic.
    from dlctl.ops import cases
    from dlctl.ops.kubernetes.manifest import Options, manifest

    made = manifest(cases.read(file), Options(**options))  # type: ignore[arg-type]
    if output is not None:
        outfile.write(output, made.encode(), PRIVATE)
        console.written(output)
        return
    console.out(made.rstrip("\n"))
    if mode := _exposed():
        console.warn(
            f"the manifest has the keys of the run, and that file has mode {mode:04o}, for others, "
            "too: chmod 600 it, or write it with -o"
        )


def _exposed() -> int:
    """The mode of the file that standard output is, if others can read it; 0: they cannot."""
    with suppress(OSError):
        found = os.fstat(1)
        mode = stat.S_IMODE(found.st_mode)
        return mode if stat.S_ISREG(found.st_mode) and mode & OTHERS else 0
    return 0
