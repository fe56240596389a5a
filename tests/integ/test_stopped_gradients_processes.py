"""Workers of real processes stop gradients that are too old, and no sample is lost."""

from __future__ import annotations

import json

import pytest
from workplace import TASK, Workplace

PAUSE_S, SLOW_S, PARTS, SAMPLES, EPOCHS = 0.002, 0.1, 8, 1024, 4
WAIT = "threading.Event().wait(PAUSE_S)"
SLOW = f"""self.is_slow = getattr(self, "is_slow", None) or (first() and "slow") or "fast"
        threading.Event().wait({{"slow": {SLOW_S}, "fast": {PAUSE_S}}}[self.is_slow])
        with open(f"{{__file__}}.{{self.is_slow}}", "a") as file:
            file.write(".")"""
FIRST = """
def first():
    try:
        open(__file__ + ".first", "x").close()
        return True
    except FileExistsError:
        return False


class Clouds"""


def slow_task() -> str:
    """One worker, whichever is the first, takes much longer for a batch."""
    text = TASK.format(pause_s=0.0, samples=SAMPLES)
    assert WAIT in text
    return text.replace(WAIT, SLOW).replace("class Clouds", FIRST)


@pytest.mark.long
def test_a_slow_worker_stops_and_every_sample_is_trained_once(place: Workplace) -> None:
    place.task(slow_task())
    more = f"[gradient]\naccumulate = {PARTS}\n"
    method = 'name = "ringmaster"\ndelay_max = 4'
    stop = f"{{ epochs = {EPOCHS} }}"
    place.job(stop=stop, workers=3, servers=2, batch_size=4, algorithm=method, more=more)
    ended = place.dlctl("run", "job.toml", timeout_s=120)
    assert ended.code == 0, ended.err
    newest = max((place.directory / "ckpt").glob("*/manifest.json"))
    shards = [shard["state"] for shard in json.loads(newest.read_text())["shards"]]
    steps = EPOCHS * SAMPLES // (4 * PARTS)
    assert [(each["samples"], each["version"]) for each in shards] == [
        (EPOCHS * SAMPLES, steps)
    ] * 2
    begun = len((place.path / "train.py.slow").read_text())
    made = next(
        row["metrics"]["step"]
        for row in map(place.daemon, ("worker-0", "worker-1", "worker-2"))
        if row["metrics"]["step"] < steps // 6
    )
    assert begun > PARTS * made, "batches of gradients that were stopped"
    place.nothing_left()
