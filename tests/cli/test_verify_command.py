"""`verify`: what workers were told, against what the shards have on record."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from identity import ME
from remains import acknowledge, keep, save

from dlctl import config, states
from dlctl.cli.verdicts import recorded_pushes, table_of


@pytest.fixture
def run(run_directory) -> Iterator:
    made = run_directory("verify-7f3a", servers=1, workers=2).run(state="failed")
    yield made
    states.remove(made.path, config.Servers())


def verdict(dlctl_command) -> tuple[int, dict]:
    ended = dlctl_command("verify", "--json")
    return ended.code, json.loads(ended.out)


def test_what_the_servers_have_kept_is_the_last_word_of_a_run_that_died(run, dlctl_command):
    save(run, step=5, number=1, deliveries=([0, 1, 2],))
    path = keep(run, 0, version=3, deliveries=[[0, 1, 7], [1, 2, 4]])
    acknowledge(run, 0, 1, 1, 7)
    acknowledge(run, 1, 1, 2, 3)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["acknowledged"]) == (0, 0, 10)
    assert data["witnesses"] == [{"shard": 0, "source": str(path)}]
    code, out, err = dlctl_command("verify")
    assert code == 0
    assert "verify-7f3a: 10 acknowledged pushes, none lost" in err
    assert out.splitlines()[1].split() == ["worker-0", "1", "1", "server-0", "7", "7", "0"]


def test_what_was_acknowledged_and_is_not_there_is_lost(run, dlctl_command):
    keep(run, 0, version=3, deliveries=[[0, 1, 5]])
    acknowledge(run, 0, 1, 1, 7)
    acknowledge(run, 1, 1, 1, 1)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"]) == (1, 3)
    assert [(r["worker"], r["lost"]) for r in data["records"]] == [("worker-0", 2), ("worker-1", 1)]
    ended = dlctl_command("verify")
    assert (ended.code, "has lost 3 acknowledged pushes" in ended.err) == (1, True)


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_after_an_orderly_end_the_newest_checkpoint_has_the_last_word(run, dlctl_command, state):
    run.run(state=state)
    save(run, step=5, number=1, deliveries=([0, 1, 2],))
    newest = save(run, step=9, number=2, deliveries=([0, 1, 7],))
    acknowledge(run, 0, 1, 1, 7)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"]) == (0, 0)
    assert data["witnesses"] == [{"shard": 0, "source": str(newest)}]


def test_a_checkpoint_that_the_run_went_back_to_says_what_was_lost_by_that(run, dlctl_command):
    resumed = save(run, step=5, number=1, deliveries=([0, 1, 4],))
    keep(run, 0, version=3, deliveries=[[0, 2, 3]])
    run.run(resume=str(resumed))
    acknowledge(run, 0, 1, 1, 6)
    acknowledge(run, 0, 2, 2, 3)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"]) == (1, 2, 0)


def test_a_living_server_that_keeps_nothing_cannot_be_asked(run, dlctl_command):
    save(run, step=5, number=1, deliveries=([0, 1, 4],))
    acknowledge(run, 0, 1, 1, 6)
    run.run(state="running", **ME)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"]) == (0, 0, 1)
    run.run(state="failed")
    assert verdict(dlctl_command)[1]["lost"] == 2, "now nobody has it any more"


def test_epochs_that_a_shard_has_forgotten_are_unknown_unless_a_checkpoint_proves_them(
    run, dlctl_command
):
    keep(run, 0, version=3, deliveries=[[0, 3, 9]])
    save(run, step=5, number=1, deliveries=([0, 1, 4],))
    acknowledge(run, 0, 1, 1, 4)
    acknowledge(run, 0, 2, 2, 5)
    acknowledge(run, 0, 3, 3, 9)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"]) == (0, 0, 1)
    ended = dlctl_command("verify")
    assert (ended.code, "1 count cannot be checked" in ended.err) == (0, True)
    assert ended.out.splitlines()[2].split()[-2:] == ["unknown", "unknown"]


def test_a_shard_that_keeps_older_epochs_answers_for_them(run, dlctl_command):
    keep(run, 0, version=3, deliveries=[[0, 1, 4], [0, 2, 5], [0, 3, 9]])
    acknowledge(run, 0, 2, 2, 6)
    code, data = verdict(dlctl_command)
    assert (code, data["lost"], data["unknown"]) == (1, 1, 0)


def test_pushes_settled_beyond_a_held_one_count_only_without_a_hole():
    table = table_of([[0, 1, 4, 6, 7], [1, 1, 4, 4, 5], "strange", [1], [2, 1, "x"]])
    assert table == {(0, 1): 4, (1, 1): 6}
    assert recorded_pushes(table, 0, 2) == 0, "a newer epoch than the shard has ever seen"
    assert recorded_pushes(table, 0, 0) is None


def test_without_any_push_there_is_nothing_to_lose(run, dlctl_command):
    code, out, err = dlctl_command("verify")
    assert (code, out) == (0, "")
    assert "no push so far" in err


def test_a_record_that_cannot_be_read_is_no_proof(run, dlctl_command):
    acknowledge(run, 0, 1, 1, 7)
    (run.path / "acks" / "worker-0.1").write_bytes(b"cut")
    ended = dlctl_command("verify")
    assert (ended.code, "no record of a worker's acks" in ended.err) == (1, True)
