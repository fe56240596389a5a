"""All workers of a run have the same data, by its names: now, later, and when the run resumes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dlctl import registry
from dlctl.job.config import Data, Job, JobFile, Stop, Workers
from dlctl.model.flat import TRAINED, Layout, TensorEntry
from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.records import AddEvent, Remember
from dlctl.roles.coordinator.supervision.registration import Past
from dlctl.roles.protocol.keyring import Keyring
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Received, Started

LAYOUT = Layout((TensorEntry("weight", TRAINED, (3,), "float32", ()),))
BATCH, PORTION = 8, 16
FRESH = "after a change start with --fresh"
AGAIN = "dlctl recover --from-checkpoint"
OTHER_FILES = "lists other files than at the checkpoint, or in another order"


def job(**stop: Any) -> JobFile:
    return JobFile(
        job=Job(name="same", task="train.py:task", stop=Stop(**stop)),
        workers=Workers(count=2, batch_size=BATCH),
        data=Data(portion_batches=PORTION // BATCH),
    )


STREAM, MAP = job(samples=10_000), job(epochs=4)


class Led:
    """A coordinator; `memory` is that of its predecessor, `data` that of the run's checkpoint."""

    def __init__(
        self, job: JobFile, memory: dict[str, Any] | None = None, data: dict[str, Any] | None = None
    ) -> None:
        manifest = {"layout": LAYOUT.to_rows(), "data": json.loads(json.dumps(data))}
        past = Past(
            restore="checkpoints/1" if data else "", manifest=manifest if data else {},
            memory=json.loads(json.dumps(memory or {})),
        )  # fmt: skip
        method = registry.load("algorithms", job.algorithm.name)
        self.machine = Coordinator("run-1", job, Keyring(b"key"), method, past)
        self.memory: dict[str, Any] = memory or {}
        self.events: list[str] = []
        """Of what is new in the data."""
        self._keep(self.machine.handle(Started(), 1.0))
        for name in ("worker-0", "worker-1"):
            worker = self.machine.members.daemons[name]
            if not worker.alive:
                self.machine.start_daemon(worker, 1.0)
            worker.registered, worker.peer = True, name.encode()

    def _keep(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Remember):
                self.memory[effect.key] = effect.value
                if effect.value is None:
                    del self.memory[effect.key]
            elif isinstance(effect, AddEvent) and effect.kind == "data":
                self.events.append(effect.text)

    @property
    def pool(self) -> Any:
        return self.machine.data.pool

    def builds(self, name: str, listed: str = "", **fields: Any) -> str:
        """What the run, or the worker once the run has begun, fails of when a worker has built its
        data; "" if it is taken. listed: names of the shards of a stream.
        """
        shards = listed.split()
        given = {"samples": 0, "shards": len(shards), "names": "\n".join(shards).encode()} | fields
        ready = m.ModelReady(name, LAYOUT.to_bytes(), **given)
        self._keep(self.machine.handle(Received(name.encode(), ready), 2.0))
        end = self.machine.run.shutdown
        assert end is None or end.state == "failed"
        return end.reason if end is not None else self.machine.members.daemons[name].error

    def takes(self, slot: int, count: int = 1) -> list[tuple[int, int, int]]:
        """The next portions of a slot, which does them: the number of a shard, start and stop."""
        taken = []
        for _ in range(count):
            portion = self.pool.take(slot, 0.0)
            self.pool.finish(portion.data_epoch, portion.portion, 0.0)
            taken.append((portion.shard, portion.start, portion.stop))
        return taken

    def saves(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(json.dumps(self.machine.manifest()["data"]))
        return data


def test_training_loops_begin_with_the_same_values() -> None:
    """Replicas that exchange only gradients would else never be the same model."""
    led = Led(MAP)
    assert led.builds("worker-0", samples=40, values="a") == ""
    assert "torch.manual_seed" in led.builds("worker-1", samples=40, values="b")
    same = Led(MAP)
    assert same.builds("worker-0", samples=40, values="a") == ""
    assert same.builds("worker-1", samples=40, values="a") == ""
    resumed = Led(MAP, data=same.saves())
    assert resumed.builds("worker-0", samples=40, values="a") == ""
    assert resumed.builds("worker-1", samples=40, values="b") == ""


def test_the_order_of_the_first_worker_is_the_run_s_and_the_numbers_are_by_name() -> None:
    led = Led(STREAM)
    assert led.builds("worker-0", "d a c b") == ""
    assert led.builds("worker-1", "a b c d") == ""
    begun = [led.takes(slot)[0][0] for slot in range(4)]
    assert begun == [3, 0, 2, 1]
    assert led.saves()["stream_names"] == ["d", "a", "c", "b"]


@pytest.mark.parametrize(
    ("names", "why", "hint"),
    [
        ("a b c", 'others than those of this run: it lacks "d"', FRESH),
        ("a b c d e", 'it has, besides, "e"', AGAIN),
        ("a b c x", 'it lacks "d"; it has, besides, "x"', FRESH),
        ("t u v w x", 'it lacks "d", "a", "c" and 1 more; it has, besides, "t", "u"', FRESH),
        ("a b c d d", 'it has, besides, "d"', AGAIN),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_other_shards_in_a_worker_are_refused_by_name(
    names: str, why: str, hint: str, restarted: bool
) -> None:
    led = Led(STREAM)
    led.builds("worker-0", "d a c b")
    if restarted:  # All of the run is on record.
        led = Led(STREAM, led.memory)
    reason = led.builds("worker-1", names)
    assert "worker-1" in reason
    assert why in reason
    assert hint in reason


@pytest.mark.parametrize("first", [True, False])
def test_numbers_in_one_worker_and_names_in_another_are_refused(first: bool) -> None:
    led = Led(STREAM)
    with_names, without = {"names": b"a\nb"}, {"names": b""}
    assert led.builds("worker-0", shards=2, **(with_names if first else without)) == ""
    reason = led.builds("worker-1", shards=2, **(without if first else with_names))
    assert "worker-1" in reason


@pytest.mark.parametrize(
    "fields",
    [{"names": b"a\nb"}, {"names": b"\xff"}, {"shards": 1, "names": b"a\nb"}, {"files": "x"}],
)
def test_names_that_no_worker_would_send_are_refused(fields: dict[str, Any]) -> None:
    led = Led(STREAM)
    assert led.builds("worker-0", **{"shards": 3, **fields}) == ""
    assert not led.machine.members.daemons["worker-0"].model_ready
    assert led.builds("worker-1", shards=3, names=b"a\nb\nc") == "", "nothing of it was taken"


@pytest.mark.parametrize("again", [False, True])
def test_what_an_earlier_dlctl_has_recorded_of_a_stream_goes_on_by_the_names(again: bool) -> None:
    """It has the shards by their places, and no names; a worker may be late to report them."""
    led = Led(STREAM)
    led.builds("worker-0", "a b c d")
    led.takes(0, 2)
    led.builds("worker-1", "a b c d")
    led = Led(STREAM, _of_earlier(led.memory))
    if again:
        led = Led(STREAM, led.memory)
    assert led.builds("worker-0", "a b c d") == ""
    assert led.builds("worker-1", "d c b a") == ""
    assert led.pool.samples_done == 32
    assert led.saves()["stream_names"] == ["a", "b", "c", "d"]
    led = Led(STREAM, led.memory)
    assert '"d"' in led.builds("worker-0", "a b c")


def test_a_stream_recorded_by_places_that_are_not_those_of_the_names_is_refused() -> None:
    led = Led(STREAM)
    led.builds("worker-0", "a b")
    led = Led(STREAM, _of_earlier(led.memory))
    reason = led.builds("worker-0", "b a")
    assert "numbered" in reason
    assert AGAIN in reason


def test_what_an_earlier_dlctl_has_recorded_of_a_map_style_dataset_gets_its_files() -> None:
    led = Led(MAP)
    led.builds("worker-0", samples=64)
    led = Led(MAP, _of_earlier(led.memory))
    assert led.builds("worker-0", samples=64, files="a" * 64) == ""
    assert "worker-1" in led.builds("worker-1", samples=64, files="b" * 64)


def _of_earlier(memory: dict[str, Any]) -> dict[str, Any]:
    """What a coordinator of an earlier dlctl would have recorded."""
    return {key: row for key, row in memory.items() if key not in ("names", "files", "order")}


def test_the_next_coordinator_leases_the_same_shards_by_the_same_numbers() -> None:
    led = Led(STREAM)
    led.builds("worker-0", "d a c b")
    assert led.takes(0, 2) == [(3, 0, 16), (3, 16, 32)]
    led.builds("worker-1", "c a b d")
    led = Led(STREAM, led.memory)
    assert led.builds("worker-1", "b a d c") == ""
    assert led.pool.samples_done == 32
    assert [led.takes(slot)[0] for slot in (0, 1)] == [(0, 0, 16), (2, 0, 16)]


def test_what_is_done_of_a_shard_at_a_checkpoint_is_done_by_its_name() -> None:
    """Also if shards are new, wherever their names are in the order."""
    led = Led(STREAM)
    led.builds("worker-0", "d a c b")
    assert led.takes(0, 2) == [(3, 0, 16), (3, 16, 32)]
    assert led.takes(1, 1) == [(0, 0, 16)]
    led = Led(STREAM, data=led.saves())
    assert led.builds("worker-1", "0 b x a d c") == ""
    assert led.builds("worker-0", "a b c d x 0") == ""
    assert led.events == ["2 shards of the stream are new since the checkpoint"]
    assert led.pool.samples_done == 48
    # Sorted: 0 a b c d x. The new ones are begun last.
    assert [led.takes(slot)[0] for slot in range(6)] == [
        (3, 0, 16), (2, 0, 16), (0, 0, 16), (5, 0, 16), (1, 16, 32), (4, 32, 48),
    ]  # fmt: skip
    assert led.saves()["stream_names"] == ["d", "a", "c", "b", "0", "x"]
    reason = led.builds("worker-0", "d a c b")
    assert '"0", "x"' in reason


def test_a_new_shard_belongs_to_the_newest_data_epoch_alone() -> None:
    led = Led(STREAM)
    led.builds("worker-0", "b c")
    pool = led.pool
    held = [pool.take(0, 0.0), pool.take(1, 0.0)]
    for shard in (0, 1):
        pool.ended(0, shard, 16)
    pool.finish(0, held[0].portion, 0.0)
    assert pool.take(0, 0.0).data_epoch == 1
    data = led.saves()
    assert len(data["stream"][1]) == 2
    led = Led(STREAM, data=data)
    assert led.builds("worker-0", "a b c") == ""
    pool = led.pool
    left = [pool.take(slot, 0.0) for slot in range(4)]
    assert [(one.data_epoch, one.shard) for one in left] == [(0, 2), (1, 1), (1, 0), (1, 2)]
    for one in left[:1]:
        pool.finish(one.data_epoch, one.portion, 0.0)
    assert pool.samples_in_all() == 32


@pytest.mark.parametrize("fields", [{"listed": "a b c"}, {"listed": "a b c e"}, {"shards": 4}])
def test_a_run_does_not_resume_without_a_shard_that_it_had(fields: dict[str, Any]) -> None:
    led = Led(STREAM)
    led.builds("worker-0", "d a c b")
    reason = Led(STREAM, data=led.saves()).builds("worker-0", **fields)
    assert "worker-0" in reason
    assert FRESH in reason


def test_a_checkpoint_without_names_has_the_order_of_the_worker_that_resumes_it() -> None:
    """As earlier versions saved it, or a stream whose shards had only numbers."""
    led = Led(STREAM)
    led.builds("worker-0", shards=3)
    assert led.takes(0, 2) == [(0, 0, 16), (0, 16, 32)]
    data = led.saves()
    assert "stream_names" not in data
    led = Led(STREAM, data=data)
    assert led.builds("worker-0", "c b a") == ""
    assert [led.takes(slot)[0] for slot in range(3)] == [(1, 0, 16), (0, 0, 16), (2, 32, 48)]
    other = Led(STREAM, data=data).builds("worker-0", "c b a x")
    assert re.findall(r"(\d) shards", other) == ["4", "3"]


# ---------------------------------------------------------------- files of a map-style dataset

A, B = 64 * "a", 64 * "b"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("files", [B, ""])
def test_other_files_in_a_worker_are_refused(files: str, restarted: bool) -> None:
    led = Led(MAP)
    assert led.builds("worker-0", samples=64, files=A) == ""
    if restarted:
        led = Led(MAP, led.memory)
        assert led.builds("worker-0", samples=64, files=A) == ""
    reason = led.builds("worker-1", samples=64, files=files)
    assert "worker-1" in reason
    assert "os.listdir" in reason


@pytest.mark.parametrize(
    ("before", "now", "done"), [(A, A, 1.5), (A, B, 1.0), ("", B, 1.5), (A, "", 1.5)]
)
def test_a_run_that_resumes_with_other_files_begins_its_data_epoch_again(
    before: str, now: str, done: float
) -> None:
    led = Led(MAP)
    led.builds("worker-0", samples=64, files=before)
    for _ in range(6):
        portion = led.pool.take(0, 0.0)
        led.pool.finish(portion.data_epoch, portion.portion, 0.0)
    led = Led(MAP, data=led.saves())
    assert led.builds("worker-1", samples=64, files=now) == ""
    assert led.builds("worker-0", samples=64, files=now) == ""
    assert led.machine.progress.epochs_done() == done
    assert [OTHER_FILES in text for text in led.events] == [True] * (done == 1.0)
    assert led.saves().get("dataset_files", "") == now


def test_the_next_coordinator_knows_the_order_of_the_samples() -> None:
    led = Led(MAP)
    led.builds("worker-0", samples=64, order="ab")
    assert "order" not in led.memory, "the task may still change"
    led.machine.release(3.0)
    led.builds("worker-1", samples=64, order="ab")
    assert led.memory["order"] == "ab"
    led = Led(MAP, led.memory)
    assert "order" in led.builds("worker-1", samples=64, order="cd")
