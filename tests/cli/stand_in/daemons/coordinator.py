"""A coordinator without daemons, which does what $STAND_IN says, for tests of `start` and `run`.

It is a real process with a real database, log, control socket and checkpoints; only the training is
missing. `STAND_IN` is one of the functions below; several may be joined by commas. The tests start
a hundred of them: each imports no more than its scene needs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import zmq

from dlctl.runs import checkpoints, paths
from dlctl.runs.database import RunDb
from dlctl.util import processes

FULL = "server-0: disk full"
FAILED = {"code": "checkpoint-failed", "daemon": "run", "since": None, "facts": {"error": FULL}}


class Coordinator:
    def __init__(self, directory: Path, incarnation: str) -> None:
        self.directory = directory
        self.incarnation = incarnation
        self.db = RunDb(directory)
        self.router = zmq.Context.instance().socket(zmq.ROUTER)

    def put(self, **values: object) -> None:
        start = processes.start_of(os.getpid())
        self.db.put_run(updated_at=time.time(), updated_by=start, pid_start=start, **values)
        self.db.commit()

    def daemon(self, name: str, **values: object) -> None:
        self.db.put_daemon(name, {"name": name, "role": name.partition("-")[0], **values})
        self.db.commit()

    def log(self, level: str, text: str) -> None:
        now = datetime.now(UTC).isoformat()
        print(json.dumps({"ts": now, "level": level, "msg": text}), flush=True)

    # ------------------------------------------------------------ what $STAND_IN may name

    def die(self) -> None:
        """Before anything has been written."""
        raise RuntimeError("there is no such task")

    def start(self) -> None:
        address = paths.socket_address(self.directory.name, "control")
        self.router.bind(address)
        self.put(pid=os.getpid(), started_at=time.time(), control=address)
        self.put(state="starting", waiting="worker-0 (importing torch)")
        self.daemon("worker-0", state="starting", phase="importing torch")

    def stick(self) -> None:
        """Never become ready."""
        self.serve(None)

    def fail(self) -> None:
        """As the real one does when the user's code cannot be imported."""
        self._fail()

    def fail_once_ready(self) -> None:
        """In one transaction: nobody sees it ready, and well."""
        self._fail(ready_at=time.time())

    def fail_soon(self) -> None:
        """As the real one does when the task raises as soon as the run is ready."""
        self.put(state="stopping", reason="worker-0: ImportError", ready_at=time.time())
        self.serve(500)
        self._fail()

    def _fail(self, **values: object) -> None:
        words = ["Traceback (most recent call last):", "ImportError: no module named tensors"]
        end = {"code": 1, "text": "exit 1", "at": time.time(), "last_lines": words}
        self.daemon("worker-0", state="failed", error="ImportError", last_exit=end)
        self.end("failed", "worker-0: ImportError", **values)

    def fail_at_work(self) -> None:
        """As the real one does when the user's loss() raises: it, and the worker, say so."""
        error = "task.loss raised KeyError: 'labels' (train.py:30); look at the keys"
        trace = ["Traceback (most recent call last):", '  File "train.py", line 30, in loss']
        words = ["INFO worker-0 starts, pid 7", f"ERROR {error}", *trace]
        end = {"code": 1, "text": "exit 1", "at": time.time(), "last_lines": words}
        self.log("warning", f"worker-0: {error}")
        self.serve(1000)  # It is known a moment later that this ends the run.
        self.put(state="stopping", reason=f"worker-0: {error}")
        for ended in ("worker-0 ended: exit 1", "worker-1 ended: exit 9"):
            self.log("warning", ended)
        self.daemon("worker-0", state="failed", error=error, last_exit=end)
        self.end("failed", f"worker-0: {error}")

    def ready(self) -> None:
        self.put(state="running", waiting="", step=self.resumed_step(), ready_at=time.time())
        for name in ("worker-0", "worker-1"):
            self.daemon(name, state="running", metrics={"step": 1, "staleness_mean": 1.5})

    def warn(self) -> None:
        self.log("warning", "worker-1 is behind by 6 steps")
        self.log("info", "nothing to see here")

    def linger(self) -> None:
        """Train for half a second."""
        self.serve(500)

    def forever(self) -> None:
        self.serve(None)

    def finish(self) -> None:
        self.put(step=100, data_epoch=1.0, loss=0.25, evaluation={"accuracy": 0.91, "step": 100})
        self.save(100)
        self.end("finished", "1 epoch")

    def finish_slowly(self) -> None:
        """Its daemons take their time to leave; meanwhile it says again that it has finished."""
        self.save(100)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            self.put(state="finished", reason="1 epoch", ended_at=time.time(), step=100)
            self.router.poll(50)
        sys.exit(0)

    def finish_unsaved(self) -> None:
        """The last checkpoint fails; there is an older one."""
        self.save(100)
        self.put(step=120, data_epoch=1.0, checkpoint_error=FULL, problems=[FAILED])
        self.end("finished", "1 epoch")

    def mute(self) -> None:
        """Alive, and never answers."""
        signal.pause()

    # ------------------------------------------------------------ what they are made of

    def resumed_step(self) -> int:
        resume = self.db.run()["resume"]
        if not resume:
            return 0
        return checkpoints.read_manifest(checkpoints.of_run(self.directory, resume))["step"]

    def serve(self, timeout_ms: int | None) -> None:
        """Wait for "stop"; then save, say so and end."""
        if not self.router.poll(timeout_ms):
            return
        from dlctl.roles.coordinator.shutdown import stop_reason
        from dlctl.wire import codec
        from dlctl.wire.messages import Reply

        while self.router.poll(timeout_ms):
            peer, *frames = self.router.recv_multipart()
            request = codec.decode(frames)

            def answer(done: bool, result: dict, peer=peer, request=request) -> None:
                reply = Reply(request.request, done, "", result)
                self.router.send_multipart([peer, *codec.encode(reply)])

            answer(False, {"phase": "draining", "waiting": ["worker-0"]})
            if os.environ.get("STAND_IN_SLOW") and not request.arguments["kill"]:
                continue
            if request.arguments["checkpoint"] and self.db.run()["state"] == "running":
                self.save(self.db.run()["step"] + 50)
            reason = stop_reason(request.arguments.get("origin"))
            self.put(state="stopped", reason=reason, ended_at=time.time())
            answer(True, {"state": "stopped"})
            self.router.close(linger=1000)
            sys.exit(0)

    def save(self, step: int) -> None:
        import numpy as np

        number = len(self.db.checkpoints()) + 1
        directory = checkpoints.create(self.directory, step, number)
        arrays = {
            "w": np.full(3, step, np.float32),
            "averaged": np.zeros(0),
        }
        sha256, nbytes = checkpoints.write_arrays(directory / "shard-0.safetensors", arrays)
        shard = {"name": "server-0", "file": "shard-0.safetensors", "sha256": sha256}
        shard |= {"nbytes": nbytes, "state": {}, "lo": 0, "hi": 3}
        job = json.loads((self.directory / "job.json").read_text())
        manifest = {
            "schema": "dlctl.checkpoint/1", "run_id": self.directory.name, "job": "quick",
            "number": number, "step": step, "samples": 0, "at": time.time(),
            "layout": [["w", "trained", [3], "float32", []]], "size": 3, "workers": [],
            "algorithm": job["algorithm"]["name"], "optimizer": job["optimizer"]["name"],
            "shards": [shard], "data": {"portions": []}, "evaluation": None,
        }  # fmt: skip
        checkpoints.write_manifest(directory, manifest)
        row = {
            "number": number,
            "step": step,
            "path": str(directory),
            "nbytes": nbytes,
            "error": "",
        }
        self.db.put_checkpoint(number, row)
        self.put(step=step, checkpoint={**row, "at": time.time()})

    def end(self, state: str, reason: str, **values: object) -> None:
        self.put(state=state, reason=reason, ended_at=time.time(), **values)
        sys.exit(0 if state == "finished" else 1)


def main() -> None:
    directory, _, incarnation, _ = sys.argv[1:]
    coordinator = Coordinator(Path(directory), incarnation)
    with closing(coordinator.db):
        for name in os.environ["STAND_IN"].split(","):
            getattr(coordinator, name)()


main()
