"""A job on three hosts, each with its own network, files and sshd, and the command on a fourth."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from workplace import Workplace

from .cluster import Cluster
from .jobs import (
    ENDLESS,
    HOSTS,
    LONG_S,
    SLOW_S,
    begin,
    daemons,
    digits_on_hosts,
    host_files,
    kill,
    until_moved,
)

pytestmark = pytest.mark.root

PROJECT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    "mbit_per_s",
    [
        pytest.param(None, id="as fast as it goes"),
        pytest.param(100.0, id="100 Mbit/s", marks=pytest.mark.long),
    ],
)
def test_two_servers_and_four_workers_on_three_hosts_train_digits(
    cluster: Cluster, place: Workplace, mbit_per_s: float | None
) -> None:
    for name in cluster.names:
        cluster.shape(name, mbit_per_s)
    (place.path / "train.py").write_text(digits_on_hosts(cluster))
    text = (PROJECT / "examples/digits/job.toml").read_text()
    (place.path / "job.toml").write_text(f"{text}\n{HOSTS}")
    ended = place.dlctl("run", "job.toml", timeout_s=120)
    assert ended.code == 0, ended.err
    run = place.run()
    assert run["state"] == "finished"
    assert run["evaluation"]["accuracy"] >= 0.95
    hosts = {row["name"]: row["host"] for row in run["daemons"]}
    assert {hosts[name] for name in hosts if name.startswith("worker")} == {"h1", "h2", "h3"}
    assert place.dlctl("checkpoint", "verify").code == 0, "all of it is here"
    assert place.dlctl("verify").code == 0
    logs = {path.name for path in place.directory.glob("logs/*.jsonl")}
    assert {f"{name}.1.jsonl" for name in hosts} <= logs
    assert "worker-0" in place.dlctl("logs", "worker-0").out
    for name in cluster.names:
        assert not host_files(cluster, name)
    place.nothing_left()


@pytest.mark.long
def test_whoever_is_killed_on_any_host_the_run_goes_on(cluster: Cluster, place: Workplace) -> None:
    begin(place)
    place.until_step(10)
    for host, name in (("h2", "server-1"), ("h3", "worker-2"), ("h1", "agent-1")):
        kill(cluster, host, name)
        place.until(f"{name} begins anew", lambda name=name: place.daemon(name)["incarnation"] == 2)
        place.until_state("running", timeout_s=LONG_S)
        place.until_step(place.run()["step"] + 20)
    os.kill(place.pid("coordinator"), signal.SIGKILL)
    place.until_step(place.run()["step"] + 20)
    place.until_state("running")
    agents = [place.daemon(f"agent-{i}")["incarnation"] for i in range(4)]
    assert agents == [1, 2, 1, 1], "who lives goes on"
    assert place.dlctl("stop").code == 0
    assert place.run()["checkpoint"]["step"] == place.run()["step"], "nothing is lost"
    place.nothing_left()


@pytest.mark.long
def test_a_stopped_job_goes_on_from_the_checkpoint_that_was_collected(
    cluster: Cluster, place: Workplace
) -> None:
    begin(place)
    place.until_step(20)
    assert place.dlctl("stop").code == 0
    step = place.run()["step"]
    for name in cluster.names:
        assert not host_files(cluster, name), "the hosts have nothing to go on from"
    place.start()
    place.until_step(step + 20)
    assert "resumed from the checkpoint" in " ".join(place.events("resumed"))
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_host_that_is_cut_off_and_comes_back_loses_nothing(
    cluster: Cluster, place: Workplace
) -> None:
    begin(place)
    place.until_step(20)
    cluster.cut("h3")
    place.until("it is missed", lambda: place.run()["state"] == "degraded")
    step = place.run()["step"]
    place.until_step(step + 20)
    cluster.heal("h3")
    place.until_state("running", timeout_s=LONG_S)
    place.until_step(place.run()["step"] + 20)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_the_workers_of_a_host_that_is_lost_for_good_go_on_elsewhere(
    cluster: Cluster, place: Workplace
) -> None:
    begin(place, HOSTS + "[timeouts]\nsilent_s = 2.0\nhost_s = 6.0\n")
    place.until_step(20)
    cluster.lose("h3")
    until_moved(place)
    ended = place.dlctl("stop")
    assert ended.code in (0, 8), ended.err
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_a_worker_whose_host_was_given_up_finds_itself_replaced_and_ends(
    cluster: Cluster, place: Workplace
) -> None:
    """It lives all the while, and nobody can kill it; what it still has to say is not heard."""
    begin(place, HOSTS + "[timeouts]\nsilent_s = 2.0\nhost_s = 6.0\n")
    place.until_step(20)
    assert "worker-2" in daemons(cluster, "h3")
    cluster.cut("h3")
    until_moved(place)
    assert "worker-2" in daemons(cluster, "h3"), "there are two of it now"
    cluster.heal("h3")
    place.until("it ends", lambda: "worker-2" not in daemons(cluster, "h3"), LONG_S)
    (log,) = (cluster.files("h3") / "root").rglob("worker-2.1.jsonl")
    # By whom it hears that first, a server or the coordinator, nobody can say.
    assert re.search(r"exit 75: (fenced|worker-2 has been replaced)", log.read_text())
    place.until_step(place.run()["step"] + 20)
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code == 0
    place.nothing_left()


@pytest.mark.long
def test_without_the_host_of_a_shard_the_run_goes_on_from_its_checkpoint_on_the_others(
    cluster: Cluster, place: Workplace
) -> None:
    limits = "[timeouts]\nsilent_s = 2.0\nhost_s = 4.0\n"
    begin(place, HOSTS + limits, checkpoint_every_s=1.0)
    place.until("a checkpoint is here", lambda: place.run().get("checkpoint"))
    cluster.lose("h2")
    place.until_state("failed", timeout_s=LONG_S)
    said = "the host h2 has not been reached for 4 s, and with it server-1: its shard is lost"
    assert place.run()["reason"] == said
    step = place.run()["checkpoint"]["step"]
    others = HOSTS.replace('[[hosts]]\nssh = "h2"\n', "")
    place.job(stop=ENDLESS, servers=2, workers=3, checkpoint_every_s=1.0, more=others + limits)
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 0, ended.err
    assert f"from step {step}" in ended.err
    place.until_step(step + 50)
    assert place.daemon("server-1")["host"] == "h3"
    assert place.dlctl("stop").code == 0
    assert place.dlctl("verify").code in (0, 1), "what came after that checkpoint is lost, and said"
    place.nothing_left()


@pytest.mark.long
def test_a_host_whose_sshd_does_not_know_us_fails_the_start_in_ssh_s_own_words(
    cluster: Cluster, place: Workplace
) -> None:
    place.job(more=HOSTS, servers=2, workers=3)
    cluster.break_key("h2")
    ended = place.dlctl("start", "job.toml")
    assert ended.code == 7
    assert "Permission denied (publickey)" in ended.err
    assert "h2" in ended.err
    assert "dlctl doctor job.toml" in ended.err
    for name in cluster.names:
        assert not daemons(cluster, name)
    place.nothing_left()


@pytest.mark.long
def test_only_the_expected_ports_are_open_and_stop_kill_ends_what_is_left_on_every_host(
    cluster: Cluster, place: Workplace
) -> None:
    begin(place)
    place.until_step(5)
    servers = {"h1": ["server-0"], "h2": ["server-1"], "h3": []}
    for name, expected in servers.items():
        there = [found for found in cluster.listening(name) if found.process != "sshd"]
        assert [found.address for found in there] == [cluster.address(name)] * len(expected)
    (control,) = [
        found for found in cluster.listening("lab") if found.pid == place.pid("coordinator")
    ]
    assert control.address == cluster.address("lab")
    home = [psutil.Process(place.pid(name)) for name in ("coordinator", "agent-0")]
    place.kill_at_once(home)
    assert daemons(cluster, "h1")
    ended = place.dlctl("stop", "--kill")
    assert ended.code == 0, ended.err
    for name in cluster.names:
        assert not daemons(cluster, name)
        assert not host_files(cluster, name)
    place.nothing_left()


@pytest.mark.long
def test_all_hosts_get_new_keys_and_nothing_is_lost(cluster: Cluster, place: Workplace) -> None:
    begin(place)
    place.until_step(10)
    before = (place.directory / "key").read_bytes()
    ended = place.dlctl("keys", "rotate", timeout_s=2 * LONG_S)
    assert ended.code == 0, ended.err
    assert (place.directory / "key").read_bytes() != before
    rows = {row["name"]: row["incarnation"] for row in place.run()["daemons"]}
    assert set(rows.values()) == {2}, rows
    place.until_step(place.run()["step"] + 20)
    assert place.dlctl("stop").code == 0
    assert place.run()["checkpoint"]["step"] == place.run()["step"], "nothing is lost"
    place.nothing_left()


@pytest.mark.long
def test_ctrl_c_twice_ends_a_run_on_all_hosts_at_once(cluster: Cluster, place: Workplace) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2, workers=3, more=HOSTS)
    command = place.begin("run", "job.toml")
    place.until_step(5, timeout_s=LONG_S)
    for _ in range(2):
        os.killpg(command.process.pid, signal.SIGINT)
    assert command.end(LONG_S).code == 130
    place.nothing_left()
