"""A run whose database is lost trains on: a new one begins with its checkpoint."""

from __future__ import annotations

import json
import shlex
import shutil
from contextlib import closing

import pytest
from workplace import ENDLESS, SLOW_S, Workplace

from dlctl.runs import checkpoints, database, terms


@pytest.mark.long
def test_of_a_run_whose_database_is_lost_a_new_one_goes_on_with_the_checkpoint(
    place: Workplace,
) -> None:
    place.task(pause_s=SLOW_S)
    place.job(stop=ENDLESS, servers=2, workers=2)
    old = place.start()
    place.until_step(20)
    assert place.dlctl("stop").code == 0
    (saved,) = checkpoints.complete(old)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    manifest = checkpoints.read_manifest(saved)
    (old / database.FILE).write_bytes(b"torn" * 4096)

    refused = place.dlctl("start", "job.toml")
    assert refused.code == 1, "a run that cannot be read is not passed over"
    command = f"dlctl start --from {saved.relative_to(place.path)} job.toml"
    assert command in refused.err, "and how it goes on is said"

    began = place.dlctl(*shlex.split(command)[1:])
    assert began.code == 0, began.err
    line = f"a new run starts from the checkpoint of {old.name} at step {manifest['step']}"
    assert line in began.err
    new = place.directory
    assert new != old
    place.until_step(manifest["step"] + 20)
    with closing(database.RunDb(new, readonly=True)) as db:
        issued = terms.newest(new, db)
        assert set(issued.values()) == {2}, "none that the shards know of is given out again"
    assert place.dlctl("stop").code == 0
    checked = place.dlctl("verify", "--json")
    assert (checked.code, json.loads(checked.out)["lost"]) == (0, 0), checked.err
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    shutil.rmtree(old)
    place.nothing_left()


@pytest.mark.long
def test_a_new_run_begins_with_no_damaged_or_foreign_checkpoint(place: Workplace) -> None:
    place.task()
    place.job(stop="{ steps = 20 }")
    assert place.dlctl("run", "job.toml").code == 0
    old = place.directory
    (saved,) = checkpoints.complete(old)
    adagrad = (place.path / "job.toml").read_text()
    (place.path / "mean.toml").write_text(f"{adagrad}\n[average]\nema = 0.9\n")
    shard = saved / "shard-0.safetensors"
    for source, job, why in (
        (old, "job.toml", "is not a checkpoint directory: it has no manifest.json"),
        (saved, "mean.toml", "was trained without [average]"),
        (saved, "job.toml", "this checkpoint is damaged"),
    ):
        if "damaged" in why:
            shard.write_bytes(shard.read_bytes()[:-1])
        refused = place.dlctl("start", "--from", str(source), job)
        assert (refused.code in (1, 2), why in refused.err) == (True, True), refused.err
        assert [path.name for path in (place.path / "runs").iterdir()] == [old.name]
    place.nothing_left()
