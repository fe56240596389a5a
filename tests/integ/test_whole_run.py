"""A job from its first word to the exported model, over TCP, with two workers and two servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from workplace import Ended, Workplace

ACCURACY = 0.95
PLAIN_LOSS = "return functional.cross_entropy(model(points), label)"
MORE = """loss = functional.cross_entropy(model(points), label)
        return loss, {"halved": loss.detach() / 2, "size": len(label)}

    def finish(self, model, metrics):
        assert not model.training
        print("printed by finish")
        import faulthandler, subprocess, sys
        faulthandler.enable()
        subprocess.run(["echo", "printed by a child"], stdout=sys.stdout, check=True)
        again = self.evaluate(model)["accuracy"]
        return f"the accuracy is {metrics['accuracy']:.6f}, it is {again:.6f}"
"""


class Finished(NamedTuple):
    place: Workplace
    ended: Ended


@pytest.fixture(scope="module")
def finished(shared_place: Workplace) -> Iterator[Finished]:
    """A run that has reached its target."""
    place = shared_place
    for name in ("daemons", "msgpack", "safetensors"):
        (place.path / f"{name}.py").write_text("raise RuntimeError('not the module you want')\n")
    place.job(
        stop=f'{{ epochs = 20, target = "accuracy >= {ACCURACY}" }}', workers=2, servers=2,
        more='best = "accuracy max"\n[network]\ntransport = "tcp"\n',
    )  # fmt: skip
    task = (place.path / "train.py").read_text()
    assert PLAIN_LOSS in task
    (place.path / "train.py").write_text(task.replace(PLAIN_LOSS, MORE))
    yield Finished(place, place.dlctl("run", "job.toml"))
    place.nothing_left()


def test_it_ends_well_and_says_where_the_model_is_and_what_comes_next(finished: Finished) -> None:
    assert finished.ended.code == 0, finished.ended.err
    assert "finished" in finished.ended.out
    assert re.search(r"checkpoint  step [\d,]+,.* runs/clouds-\w+/ckpt/\d+-\d+", finished.ended.out)
    assert "dlctl checkpoint export" in finished.ended.err
    assert "dlctl run --fresh job.toml" in finished.ended.err
    assert "WARN" not in finished.ended.err, "nothing is wrong with an orderly end"


def test_the_target_is_reached(finished: Finished) -> None:
    run = finished.place.run()
    assert run["evaluation"]["accuracy"] >= ACCURACY
    assert "target" in run["reason"]
    assert all(row["last_exit"]["code"] == 0 for row in run["daemons"])


def test_finish_has_run_with_the_final_model_and_is_shown(finished: Finished) -> None:
    accuracy = finished.place.run()["evaluation"]["accuracy"]
    text = f"printed by finish\nthe accuracy is {accuracy:.6f}, it is {accuracy:.6f}"
    assert finished.ended.out.endswith(text + "\n")
    assert finished.place.run()["finish"] == {"worker": "worker-0", "text": text, "error": ""}
    logged = finished.place.dlctl("logs", "worker-0").out
    assert "INFO  printed by finish  stream=stdout" in logged
    assert "INFO  printed by a child  stream=stdout" in logged


def test_what_a_loss_returns_besides_is_shown(finished: Finished) -> None:
    run = finished.place.run()
    assert run["metrics"]["halved"] == pytest.approx(run["loss"] / 2)
    assert run["metrics"]["size"] == 8
    workers = [row["metrics"] for row in run["daemons"] if row["role"] == "worker"]
    for found in workers:
        assert found["task"]["halved"] == pytest.approx(found["loss"] / 2, abs=1e-5)
    assert "halved 0." in finished.ended.out


def test_the_best_checkpoint_is_that_of_the_target(finished: Finished) -> None:
    ended = finished.place.dlctl("checkpoint", "ls", "--json")
    found = json.loads(ended.out)["checkpoints"]
    best = [row["evaluation"]["accuracy"] for row in found if row["is_best"]]
    assert best == [max(row["evaluation"]["accuracy"] for row in found)]


@pytest.mark.per_commit(1)
@pytest.mark.parametrize(("kind", "name"), [("torch", "m.pt"), ("safetensors", "m.safetensors")])
def test_the_exported_model_is_as_good_as_the_run_said(
    finished: Finished, kind: str, name: str
) -> None:
    place = finished.place
    ended = place.dlctl("checkpoint", "export", "-o", name)
    assert ended.code == 0, ended.err
    path = place.path / name
    state = torch.load(path) if kind == "torch" else load_file(path)
    assert _accuracy(place, state) == pytest.approx(place.run()["evaluation"]["accuracy"])


def _accuracy(place: Workplace, state: dict[str, torch.Tensor]) -> float:
    names: dict[str, object] = {}
    exec((place.path / "train.py").read_text(), names)
    task = names["task"]
    model: nn.Module = task.model()  # type: ignore[attr-defined]
    model.load_state_dict(state, strict=True)
    return float(task.evaluate(model)["accuracy"])  # type: ignore[attr-defined]


def test_every_byte_of_the_checkpoint_is_good(finished: Finished) -> None:
    ended = finished.place.dlctl("checkpoint", "verify", "--json")
    assert ended.code == 0
    assert [c["ok"] for c in json.loads(ended.out)["checkpoints"]] == [True]


def test_started_again_it_has_nothing_to_do(finished: Finished) -> None:
    ended = finished.place.dlctl("start", "job.toml")
    assert ended.code == 0


def test_to_stop_it_again_does_nothing(finished: Finished) -> None:
    ended = finished.place.dlctl("stop")
    assert ended.code == 0


def test_to_stop_what_never_was_is_an_error_with_what_there_is(finished: Finished) -> None:
    ended = finished.place.dlctl("stop", "-j", "cluods")
    assert ended.code == 4
    assert '"clouds' in ended.err


def test_to_wait_for_what_has_happened_returns_at_once(finished: Finished) -> None:
    assert finished.place.dlctl("wait").code == 0
    assert finished.place.dlctl("wait", "--for", "stopped").code == 0
    assert finished.place.dlctl("status", "--check").code == 3


@pytest.mark.long
def test_fresh_begins_a_second_run_and_leaves_the_first_alone(finished: Finished) -> None:
    """The last test here: from now on this place has a newer run."""
    place = finished.place
    first, files = place.directory, sorted(place.directory.rglob("*.safetensors"))
    ended = place.dlctl("start", "--fresh", "--no-wait", "job.toml")
    assert ended.code == 0, ended.err
    second = place.directory
    assert second != first
    assert place.dlctl("stop", "--kill").code == 0
    assert sorted(place.dlctl("ps", "-q").out.split()) == sorted([first.name, second.name])
    assert place.run()["step"] == 0
    assert sorted(first.rglob("*.safetensors")) == files
    place.nothing_left()
