"""What every algorithm in the registry must do; a new name gets all of these tests."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from builders import OWN_LR
from by_hand import Player, Shards

from dlctl import jobfile, registry
from dlctl.algorithms.base import Lead, Method, ReplicaSide, ShardSide
from dlctl.algorithms.needs import Need, NextBatch, Step
from dlctl.algorithms.shapes import faults_of
from dlctl.wire.messages import APPLIED, BUFFERED, HELD, LATE

NAMES = registry.names("algorithms")
every_algorithm = pytest.mark.parametrize(
    "algorithm", [pytest.param(registry.load("algorithms", name), id=name) for name in NAMES]
)
with_servers = pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(algorithm, id=name)
        for name in NAMES
        if (algorithm := registry.load("algorithms", name)).shape.needs_servers
    ],
)
SIZE = 12
PARTIES = ("client", "head")
BATCHES = 3
"""Of one portion."""


def gradient_of(parameters, batch):
    """Of one sample: sum and mean are the same, so that every method pushes what it was given."""
    assert np.isfinite(parameters).all(), "a replica computes before it has parameters"
    return Step(np.random.default_rng(batch).standard_normal(SIZE).astype(np.float32), 1, 1.0)


def portion(number, data_epoch=0):
    return [
        (NextBatch(data_epoch, number, batch == BATCHES - 1), [data_epoch, number, batch])
        for batch in range(BATCHES)
    ]


def of_portions(*portions):
    """The sum of their gradients, float64[SIZE]."""
    batches = [batch for batches in portions for _, batch in batches]
    return sum(gradient_of(np.zeros(SIZE), batch).gradient.astype(np.float64) for batch in batches)


def pushed_per_gradient(algorithm: Method) -> float:
    """1, or for a method that pushes the displacement of its replicas, their rate."""
    return OWN_LR if algorithm.replica.one_push(algorithm.Options()).is_displacement else 1.0


def players(algorithm: Method, workers: int, servers: int = 2) -> tuple[Shards, list[Player]]:
    shards = Shards(algorithm, np.ones(SIZE, np.float32), servers)
    shards.members(frozenset(range(workers)))
    return shards, [Player(algorithm, shards, gradient_of, slot) for slot in range(workers)]


def play(everybody: list[Player]) -> None:
    """Until each of them needs data; some may have to wait for others in between."""
    for _ in range(BATCHES * len(everybody) + 1):
        for player in everybody:
            player.advance()
    assert all(player.needs_data() and not player.todo for player in everybody)


# ---------------------------------------------------------------- options


@every_algorithm
def test_its_parts_are_the_sides_of_one_conversation(algorithm):
    assert issubclass(algorithm.replica, ReplicaSide)
    assert algorithm.shard is None or issubclass(algorithm.shard, ShardSide)
    assert issubclass(algorithm.lead, Lead)


@every_algorithm
def test_it_does_what_its_shape_declares(algorithm):
    assert faults_of(algorithm) == []


@every_algorithm
def test_a_job_file_needs_no_option_of_it(algorithm):
    options = algorithm.Options()
    assert algorithm.Options(**dataclasses.asdict(options)) == options


@every_algorithm
def test_what_changes_live_is_an_option_and_can_be_set(algorithm):
    options = algorithm.Options()
    for name in algorithm.live:
        setattr(options, name, getattr(options, name))
    assert set(algorithm.live) <= {field.name for field in dataclasses.fields(options)}


@pytest.mark.parametrize("name", NAMES)
def test_a_job_file_can_name_it(name, tmp_path):
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.toml"
    method, task = f'algorithm.name = "{name}"\n', 'task = "train.py:task"'
    if registry.load("algorithms", name).shape.is_divided:
        rows = (f'{{ name = "{r}", role = "{r}", {task}, host = "local" }}' for r in PARTIES)
        path.write_text(f'parties = [{", ".join(rows)}]\njob.name = "a"\n{method}')
    else:  # Some need somebody to talk to.
        path.write_text(f'job = {{ name = "a", {task} }}\n{method}workers.count = 2\n')
    assert jobfile.load(path).algorithm.name == name


# ---------------------------------------------------------------- workers


@every_algorithm
def test_a_replica_begins_with_a_request_that_the_roles_know(algorithm):
    _, (player,) = players(algorithm, 1)
    assert isinstance(player.request, Need)


@every_algorithm
def test_a_replica_has_nothing_left_when_it_asks_again_after_hearing_that_there_is_no_data(
    algorithm,
):
    _, (player,) = players(algorithm, 1)
    rate = pushed_per_gradient(algorithm)
    holds_all = algorithm.replica.one_push(algorithm.Options()).is_all
    for number in range(3):
        player.todo += portion(number)
        play([player])
        player.tell_none()
        done = [portion(n) for n in range(number + 1)]
        assert player.samples_done == player.samples == BATCHES * len(done)
        assert not player.training.writing.has_unpushed_steps()
        assert not player.training.busy()
        assert not player.side.residual.any()
        if algorithm.shape.needs_servers:
            assert player.samples_pushed == player.samples
        if algorithm.shape.needs_servers and holds_all:
            all_of_it = rate * of_portions(*done)
            why = "pushes hold another sum than all steps: are they displacements, which a"
            why += (
                " PushKind(is_displacement=True) declares, or only a part of them (is_all=False)?"
            )
            np.testing.assert_allclose(player.pushed, all_of_it, 1e-5, 1e-6, err_msg=why)


@every_algorithm
def test_replicas_together_do_each_sample_once(algorithm):
    _, everybody = players(algorithm, 3)
    for turn in range(4):
        for player in everybody:
            player.todo += portion(turn * 3 + player.slot)
        play(everybody)
    for player in everybody:
        player.tell_none()
    play(everybody)
    assert [player.samples_done for player in everybody] == [4 * BATCHES] * 3
    assert [player.samples for player in everybody] == [4 * BATCHES] * 3
    assert all(np.isfinite(player.parameters).all() for player in everybody)


@every_algorithm
def test_nobody_waits_for_a_replica_whose_last_gradients_were_discarded(algorithm):
    """It hears only once that there is no data, perhaps in the middle of a round without a step."""
    _, everybody = players(algorithm, 2)
    unlucky, other = everybody
    for player in everybody:
        player.todo += portion(player.slot)
    play(everybody)
    unlucky.todo += portion(2)
    unlucky.gradient = lambda _parameters, _batch: Step(np.full(SIZE, np.nan, np.float32), 1, 1.0)
    other.todo += [batch for number in range(3, 9) for batch in portion(number)]
    for _ in range(20 * BATCHES):
        for player in everybody:
            player.advance()
            if player.needs_data() and not player.todo:
                player.tell_none()
    assert (len(unlucky.todo), len(other.todo)) == (0, 0), f"{other.request} waits"


@every_algorithm
def test_a_replica_that_never_gets_data_pushes_no_samples(algorithm):
    _, (player,) = players(algorithm, 1)
    play([player])
    for _ in range(3):
        player.tell_none()
    assert player.samples_pushed == 0
    assert not player.pushed.any()


@every_algorithm
def test_a_restored_residual_is_only_added_to_where_the_method_keeps_one(algorithm):
    """The roles restore by adding: a residual has the size of the model, or none at all."""
    _, (player,) = players(algorithm, 1)
    assert len(player.side.residual) in (0, SIZE)


# ---------------------------------------------------------------- servers


@with_servers
@pytest.mark.parametrize("workers", [1, 3])
def test_servers_say_of_every_push_once_what_has_become_of_it(algorithm, workers):
    shards, everybody = players(algorithm, workers)
    for turn in range(4):
        for player in everybody:
            player.todo += portion(turn * workers + player.slot)
        play(everybody)
    for player in everybody:
        player.tell_none()
    play(everybody)
    for number, table in enumerate(shards.tables):
        is_empty = not any(shard.size for shard in table.shards)  # The task has no rows.
        assert bool(table.outcomes) == (table.sides[0].takes_pushes and not is_empty)
        for kinds in table.outcomes.values():
            assert set(kinds) <= {APPLIED, BUFFERED, HELD, LATE}
            assert kinds.count(HELD) <= 1
        assert {key: len(kinds) for key, kinds in shards.settled(number).items()} == dict.fromkeys(
            table.outcomes, 1
        )


@with_servers
def test_all_shards_come_to_the_same_as_one(algorithm):
    results = []
    for servers in (1, 3):
        shards, (player,) = players(algorithm, 1, servers)
        for data_epoch in range(2):
            player.todo += portion(0, data_epoch) + portion(1, data_epoch)
        play([player])
        results.append({name: shards.whole(name) for name in shards.numbers})
    assert results[0].keys() == results[1].keys()
    for name, whole in results[0].items():
        assert np.array_equal(whole, results[1][name]), name


SURVIVING = [name for name in NAMES if "server" in registry.load("algorithms", name).shape.survives]


@pytest.mark.parametrize("name", SURVIVING)
def test_a_server_side_can_take_another_one_s_place_at_any_moment(name):
    """What it says of itself is plain numbers, and few; the shard itself is kept elsewhere."""
    algorithm = registry.load("algorithms", name)
    shards, everybody = players(algorithm, 3)
    for turn in range(2):
        for player in everybody:
            player.todo += portion(turn * 3 + player.slot)
        play(everybody)
        served = [pair for t in shards.tables for pair in zip(t.sides, t.shards, strict=True)]
        for side, shard in served:
            state = json.loads(json.dumps(side.state()))
            assert len(json.dumps(state)) <= 40 * 3
            other = type(side)(algorithm.Options(), shard)
            other.resume(state)
            assert other.state() == state


# ---------------------------------------------------------------- the coordinator


@every_algorithm
def test_somebody_may_always_work(algorithm):
    side = algorithm.lead(algorithm.Options())
    for first in (0, 2):
        assert side.may_lease(first, first) == ""
