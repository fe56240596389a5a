"""Windows without gradients: what flows is as much as if the vectors were those of the model."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated import job_file

from daemons.simulator import protocol as windows_of
from daemons.simulator.protocol import ProtocolRun
from dlctl.ops import protocol
from dlctl.sim.request import LinkSpeed, SimulationRequest
from dlctl.wire.kinds import payload_bytes
from dlctl.wire.messages import AllowedPeers, Packed, Push

PARAMETERS, SERVERS, WORKERS = 2_000_000, 2, 4


def window(rate: str, until_s: float, **more: Any) -> tuple[Any, Any]:
    """What it says, and its network."""
    job = job_file(WORKERS, SERVERS, evaluate_epochs=0.0, **more)
    request = SimulationRequest(
        directory="", step_s=0.1, until_s=until_s, protocol_s=50.0, cores=2,
        parameters=PARAMETERS, link=LinkSpeed.parse(rate),
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


def test_a_few_workers_a_fourth_and_all_share_the_time() -> None:
    shares = protocol._shares(1000)
    assert list(shares) == [16, 250, 1000]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(protocol._shares(8)) == [2, 8]
    assert protocol._shares(1) == {1: pytest.approx(0.8)}


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
