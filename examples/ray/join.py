"""Workers of a run as actors of a Ray cluster: each executes `dlctl join` with an invitation.

    python join.py worker-1.invite worker-2.invite worker-3.invite

Ray decides on which nodes they are. It restarts an actor whose process or node is lost, as often as
that happens, and the run gives its successor the worker's place. `RAY_ADDRESS` is the cluster's
address. The exit code is that of the first worker that has ended in another way than with the run.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

PROGRAM = "train.py"
REFUSED = (2, 5, 9, 10, 77, 78)
"""Exit codes of `dlctl join` that come again however often it is tried; 5: there was no run for
half an hour."""
AGAIN_S = 1.0
CPUS, GPUS = 1, 0
"""Of each worker."""


@ray.remote(num_cpus=CPUS, num_gpus=GPUS, max_restarts=-1, max_task_retries=-1)
class Joiner:
    """One worker of the run. `program`: the content of the training script."""

    def __init__(self, name: str, invitation: bytes, program: bytes) -> None:
        # An argument of an actor is in none of Ray's lists and logs; a variable of its environment
        # would be.
        self._folder = Path(tempfile.mkdtemp(prefix="dlctl-ray-"))
        self._invitation = self._folder / name
        self._invitation.touch(0o600)
        self._invitation.write_bytes(invitation)
        (self._folder / PROGRAM).write_bytes(program)

    def join(self) -> int:
        """Train until the run is over; the exit code of `dlctl join`."""
        while True:
            code = self._run()
            if code == 0 or code in REFUSED:
                shutil.rmtree(self._folder)
                return code
            signal.sigtimedwait((), AGAIN_S)

    def _run(self) -> int:
        # It ends with this actor: on a node that lives on there would be two else.
        dies_with_us = ["setpriv", "--pdeathsig", "KILL"]
        join = [sys.executable, "-P", "-m", "dlctl", "join", "--invite", str(self._invitation)]
        python = ["--", sys.executable, PROGRAM]
        return subprocess.run([*dies_with_us, *join, *python], cwd=self._folder).returncode


def main(files: list[str]) -> int:
    # Else Ray tells its makers about the cluster, and this machine's proxies about the program.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="auto", log_to_driver=True)
    program = (Path(__file__).parent / PROGRAM).read_bytes()
    joiners = [Joiner.remote(Path(f).name, Path(f).read_bytes(), program) for f in files]
    codes: list[int] = ray.get([joiner.join.remote() for joiner in joiners])
    print(*(f"{Path(file).stem}: {code}" for file, code in zip(files, codes, strict=True)))
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
