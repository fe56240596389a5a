"""`verify`: what workers were told, against what the shards have on record."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from dead_runs import acknowledge, issue, keep, save
from process_identity import ME

from dlctl.job import config
from dlctl.launch.ssh import Ssh
from dlctl.ops.verify import recorded_pushes, table_of
from dlctl.runs import kept_shards, lineage
from dlctl.runs.lineage import Resume


@pytest.fixture
def run(run_directory) -> Iterator:
    made = run_directory("verify-7f3a", servers=1, workers=2).run(state="failed")
    yield made
    kept_shards.remove(made.path, config.Servers())


def verdict(dlctl_command) -> tuple[int, dict]:
    ended = dlctl_command("verify", "--json")
    return ended.code, json.loads(ended.out)


def test_what_the_servers_have_kept_is_the_last_word_of_a_run_that_died(run, dlctl_command, golden):
    save(run, step=5, number=1, deliveries=([0, 1, 2],))
    path = keep(run, 0, version=3, deliveries=[[0, 1, 7], [1, 2, 4]])
    acknowledge(run, 0, 1, 1, 7)
    acknowledge(run, 1, 1, 2, 3)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["acknowledged"]) == (0, 0, 10)
    assert data["witnesses"] == [{"shard": 0, "source": str(path)}]
    code, out, err = dlctl_command("verify")
    assert code == 0
    golden("verify", err)
    assert out.splitlines()[1].split() == ["worker-0", "1", "1", "0", "7", "7", "0"]


def test_hosts_are_asked_once_although_a_server_here_writes(run, dlctl_command, monkeypatch):
    content = json.loads((run.path / "job.json").read_text())
    content["hosts"] = [{"workers": 0}, {"ssh": "nowhere.invalid", "servers": 0}]
    content["launcher"]["name"] = "ssh"
    (run.path / "job.json").write_text(json.dumps(content))
    asked, ask = [], Ssh.ask
    monkeypatch.setattr(Ssh, "ask", lambda *all: asked.append(all) or ask(*all))
    path = keep(run, 0, version=3, deliveries=[])
    path.write_bytes(b"half written")
    with path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        dlctl_command("verify")
    assert len(asked) == 1


def test_what_was_acknowledged_and_is_not_there_is_lost(run, dlctl_command):
    keep(run, 0, version=3, deliveries=[[0, 1, 5]])
    acknowledge(run, 0, 1, 1, 7)
    acknowledge(run, 1, 1, 1, 1)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"]) == (1, 3)
    assert [(r["worker"], r["lost"]) for r in data["records"]] == [("worker-0", 2), ("worker-1", 1)]
    ended = dlctl_command("verify")
    assert (ended.code, "3 found" in ended.err) == (1, True)


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_after_an_orderly_end_the_newest_checkpoint_has_the_last_word(run, dlctl_command, state):
    run.run(state=state)
    save(run, step=5, number=1, deliveries=([0, 1, 2],))
    newest = save(run, step=9, number=2, deliveries=([0, 1, 7],))
    acknowledge(run, 0, 1, 1, 7)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"]) == (0, 0)
    assert data["witnesses"] == [{"shard": 0, "source": str(newest)}]


def test_what_was_acknowledged_before_the_run_went_back_is_not_judged(run, dlctl_command):
    older = save(run, step=30, number=1, deliveries=([0, 1, 40],))
    acknowledge(run, 0, 1, 1, 50)
    issue(run.path, {"worker-0": 1})
    lineage.record(run.db, run.path, older, "60 steps done again")
    run.db.commit()
    keep(run, 0, version=3, deliveries=[[0, 1, 40], [0, 2, 7]])
    acknowledge(run, 0, 2, 2, 7)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["before"], data["acknowledged"]) == (0, 0, 50, 7)
    err = dlctl_command("verify").err
    before = "50 acknowledged pushes from before the run resumed from a checkpoint"
    assert f"{before} are not" in err
    acknowledge(run, 0, 2, 2, 9)
    assert verdict(dlctl_command)[1]["lost"] == 2


def test_a_living_server_that_keeps_nothing_cannot_be_asked(run, dlctl_command):
    save(run, step=5, number=1, deliveries=([0, 1, 4],))
    acknowledge(run, 0, 1, 1, 6)
    run.run(state="running", **ME)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"]) == (8, 0, 1)
    assert dlctl_command("verify").code == 8
    run.run(state="failed")
    assert verdict(dlctl_command)[1]["lost"] == 2, "now nobody has it any more"


def test_terms_that_a_shard_has_forgotten_are_unknown_unless_a_checkpoint_proves_them(
    run, dlctl_command, golden
):
    keep(run, 0, version=3, deliveries=[[0, 3, 9]])
    save(run, step=5, number=1, deliveries=([0, 1, 4],))
    acknowledge(run, 0, 1, 1, 4)
    acknowledge(run, 0, 2, 2, 5)
    acknowledge(run, 0, 3, 3, 9)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"], data["unchecked"]) == (8, 0, 1, 5)
    ended = dlctl_command("verify")
    assert ended.code == 8
    golden("verify-unknown", ended.err)
    assert ended.out.splitlines()[2].split()[-2:] == ["-", "-"]


def test_a_shard_that_keeps_older_terms_answers_for_them(run, dlctl_command):
    keep(run, 0, version=3, deliveries=[[0, 1, 4], [0, 2, 5], [0, 3, 9]])
    acknowledge(run, 0, 2, 2, 6)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"]) == (1, 1, 0)


def test_pushes_settled_beyond_a_held_one_count_only_without_a_hole():
    table = table_of([[0, 1, 4, 6, 7], [1, 1, 4, 4, 5], "strange", [1], [2, 1, "x"]])
    assert table == {(0, 1): 4, (1, 1): 6}
    assert recorded_pushes(table, 0, 2) == 0, "a newer term than the shard has ever seen"
    assert recorded_pushes(table, 0, 0) is None


def test_without_any_push_there_is_nothing_to_lose(run, dlctl_command):
    code, out, err = dlctl_command("verify")
    assert (code, out) == (0, "")
    assert " 0 found" in err


def test_a_worker_that_has_pushed_nothing_yet_leaves_nothing_to_check(run, dlctl_command):
    acknowledge(run, 0, 1, 1, 0)
    run.run(state="running", **ME)
    code, _, err = dlctl_command("verify")
    assert (code, err) == (
        0,
        "verify-7f3a: 0 acknowledged pushes: 0 found lost, 0 could not be checked\n",
    )


# ---------------------------------------------------------------- damaged, and left


def damage(checkpoint: Path) -> None:
    """Another byte somewhere in the middle; the size stays."""
    file = checkpoint / "shard-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 0xFF
    file.write_bytes(data)


def resumed(run, checkpoint: Path, **terms: int) -> None:
    """The run has gone back to this checkpoint; `terms`: terms of workers that had begun."""
    issue(run.path, {name.replace("_", "-"): term for name, term in terms.items()})
    lineage.record(run.db, run.path, checkpoint, "")
    run.run(resume=str(checkpoint))


def test_what_only_a_damaged_checkpoint_has_is_lost_before_anything_is_recovered(
    run, dlctl_command
):
    save(run, step=15, number=15, deliveries=([0, 1, 40],))
    damage(save(run, step=16, number=16, deliveries=([0, 1, 50],)))
    acknowledge(run, 0, 1, 1, 50)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"]) == (1, 10, 0)


@pytest.mark.parametrize("count", [1, 2])
def test_what_damaged_checkpoints_had_cannot_be_known_if_there_is_no_good_one(
    run, dlctl_command, count
):
    """It was taken for a loss of everything."""
    made = [save(run, step=n, number=n, deliveries=([0, 1, 50],)) for n in range(15, 15 + count)]
    for checkpoint in made:
        damage(checkpoint)
    acknowledge(run, 0, 1, 1, 50)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unchecked"]) == (8, 0, 50)
    code, _, err = dlctl_command("verify")
    file = made[-1] / "shard-0.safetensors"
    assert (code, f"{file}: " in err) == (8, True), err


def test_a_branch_that_the_run_came_back_to_counts_again():
    """From 2 back to 1, which led to 3; then on from 2, because 3 was damaged, and 2 mended."""
    back_to_1 = Resume(1, 2, {})
    back_to_2 = Resume(2, 3, {})
    branch = lineage.chain([back_to_1, back_to_2])
    assert branch == [back_to_2]
    assert [lineage.is_of_branch(number, branch) for number in (1, 2, 3, 4)] == [1, 1, 0, 1]
    branch = lineage.chain([back_to_1])
    assert [lineage.is_of_branch(number, branch) for number in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_a_record_that_cannot_be_read_is_no_proof(run, dlctl_command):
    acknowledge(run, 0, 1, 1, 7)
    (run.path / "acks" / "worker-0.1").write_bytes(b"cut")
    ended = dlctl_command("verify")
    assert ended.code == 1
