"""Windows without gradients: what flows is as much as if the vectors were those of the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import job_file

from daemons.simulator import protocol as windows_of
from daemons.simulator.protocol import ProtocolRun, _Look
from dlctl.ops import protocol
from dlctl.records.work_times import WorkTimes
from dlctl.sim.request import LinkSpeed, SimulationRequest
from dlctl.wire.kinds import payload_bytes
from dlctl.wire.messages import AllowedPeers, Packed, Push

PARAMETERS, SERVERS, WORKERS = 2_000_000, 2, 4


def window(
    rate: str, until_s: float, asked: Mapping[str, Any] | None = None, **more: Any
) -> tuple[Any, Any]:
    """What it says, and its network. asked: more of the request, and more of the job."""
    job = job_file(WORKERS, SERVERS, evaluate_epochs=0.0, **more)
    request = SimulationRequest(
        directory="", step_s=0.1, until_s=until_s, protocol_s=50.0, cores=2,
        parameters=PARAMETERS, link=LinkSpeed.parse(rate), **(asked or {}),
    )  # fmt: skip
    run = ProtocolRun(request, job, time.process_time() + 50.0)
    return run.window(), run._simulation.world.network


def test_a_push_of_chosen_elements_has_their_share_of_the_bytes() -> None:
    options = {"density": 0.02, "dense_below": 1024}
    _, network = window("1Gbit/s", 1.0, compression=("topk", options))
    nbytes = network.nbytes["Push"] / network.messages["Push"]
    values = 0.02 * 4 * PARAMETERS / SERVERS
    assert values < nbytes < 1.6 * values  # A value, and where it is: a byte or so.


def test_a_slice_that_is_too_small_to_be_compressed_is_not() -> None:
    options = {"density": 0.02, "dense_below": PARAMETERS}
    _, network = window("1Gbit/s", 1.0, compression=("topk", options))
    nbytes = network.nbytes["Push"] / network.messages["Push"]
    assert nbytes == pytest.approx(4 * PARAMETERS / SERVERS, rel=0.01)


def test_where_the_first_messages_take_longer_than_the_window_the_link_is_busy() -> None:
    """A fetch of 8 MB takes four workers 16 s of each server's card."""
    row, _ = window("10Mbit/s", 6.0, algorithm=("sync", {}))
    assert row["trained"] == WORKERS
    assert row["start_s"] > 12
    assert row["steps_per_s"] < 1
    assert row["busy"]["link"]["name"].startswith("server-")
    assert row["busy"]["link"]["share"] > 0.9


def test_a_slow_worker_is_slow_there_too() -> None:
    usual, _ = window("100Gbit/s", 2.0)
    row, _ = window("100Gbit/s", 2.0, {"slow": {"worker-3": 10.0}})
    assert row["steps_per_s"] / usual["steps_per_s"] == pytest.approx(3.1 / 4, abs=0.1)


def test_steps_take_what_each_worker_took_in_a_run_and_further_ones_what_all_took() -> None:
    def recorded(step_s: float) -> dict[str, Any]:
        times = WorkTimes()
        for _ in range(100):
            times.add(step_s, 0.1 * step_s)
        return {"step": times.to_json()}

    usual, _ = window("100Gbit/s", 8.0)
    seen = {"worker-0": recorded(1.0), "worker-1": recorded(1.0), "*": recorded(0.4)}
    row, _ = window("100Gbit/s", 8.0, {"times": seen})
    expected = (2 * 1 + 2 * 2.5) / (4 * 10)
    assert row["steps_per_s"] / usual["steps_per_s"] == pytest.approx(expected, rel=0.2)


def test_the_halves_are_those_of_the_time_that_was_simulated() -> None:
    def halves(*steps: int) -> list[float | None]:
        return windows_of._halves([_Look(float(at), count) for at, count in enumerate(steps)])

    assert halves(0, 4, 8, 10, 12) == [4.0, 2.0]
    assert halves(0, 4) == [4.0, None]
    assert halves(3) == [None, None]


def test_a_window_that_had_too_little_time_is_not_whole() -> None:
    job = job_file(WORKERS, SERVERS, evaluate_epochs=0.0)
    request = SimulationRequest(
        directory="", step_s=0.1, until_s=1.0, protocol_s=0.0, cores=2, parameters=PARAMETERS
    )
    row = ProtocolRun(request, job, time.process_time()).window()
    assert (row["is_whole"], row["seconds"], row["halves"]) == (False, 0.0, [None, None])
    whole, _ = window("1Gbit/s", 1.0)
    assert whole["is_whole"]


def test_what_a_window_does_not_take_is_for_the_larger_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask for time by their workers; the first one, with few, gets enough in any case."""
    may_s: list[float] = []

    def asked(process: object, request: SimulationRequest) -> Any:
        if request.protocol_s is None:
            return {"measured": {"step_s": 0.1}, "parameters": 10}
        may_s.append(request.protocol_s)
        busy = {"link": {"name": "server-0 in", "share": 0.1}}
        row = {"workers": 1, "is_whole": True, "steps_per_s": 1.0, "halves": [1.0, 1.0]}
        return {"simulated": {**row, "busy": busy, "cpu_s": 4.0}}

    monkeypatch.setattr(protocol.simulate, "asked", asked)
    monkeypatch.setattr(protocol.simulators, "opened", lambda *_: nullcontext())
    (tmp_path / "train.py").write_text("task = None\n")
    file = tmp_path / "job.toml"
    file.write_text(
        '[job]\nname = "many"\ntask = "train.py:task"\nstop = { seconds = 60 }\n'
        "[servers]\ncount = 1\n[workers]\ncount = 1000\nbatch_size = 1\n"
    )
    request = SimulationRequest(directory="", until_s=1.0)
    protocol.simulate_protocol(file, {}, request, None, within_s=100.0)
    assert may_s == [pytest.approx(15.0), pytest.approx(0.2 * 96), pytest.approx(92.0)]
    assert (protocol._sizes(8), protocol._sizes(1)) == ([2, 8], [1])


@pytest.mark.parametrize("name", ["sync", "downpour"])
def test_what_servers_would_keep_for_others_takes_no_virtual_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = windows_of._endless

    def found() -> Any:
        row, network = window("1Gbit/s", 2.0, algorithm=(name, {}))
        return {**row, "cpu_s": 0.0}, network.messages, network.nbytes

    fast = found()

    def kept(job: Any) -> Any:
        return replace(endless(job), servers=replace(job.servers, durability="process"))

    monkeypatch.setattr(windows_of, "_endless", kept)
    assert found() == fast


def test_a_larger_model_has_no_longer_names_and_digests() -> None:
    known = AllowedPeers(1, b"x" * 1000)
    assert payload_bytes(known, 1e4) == payload_bytes(known) == 1000
    delta = Packed("none", 2, (np.zeros(2, np.float32),))
    push = Push(0, 1, 1, 0, 0, 0, 0, 8, 0, delta, 0)
    assert payload_bytes(push, 1e4) == 8e4
