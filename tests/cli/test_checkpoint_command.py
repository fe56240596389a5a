"""`dlctl checkpoint ls`, `verify`, `prune` and `export`, with real checkpoints on disk."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, load_file

from dlctl.ops import other_process
from dlctl.records import manifest
from dlctl.runs import checkpoints


def save(run: Path, step: int, number: int) -> Path:
    directory = checkpoints.create(run, step, number)
    shards = []
    for index, (lo, hi) in enumerate([(0, 4), (4, 6)]):
        name, values = f"server-{index}", np.arange(lo, hi, dtype=np.float32)
        file = f"shard-{index}.safetensors"
        arrays = {"w": values, "averaged": np.zeros(0)}
        sha256, nbytes = checkpoints.write_arrays(directory / file, arrays)
        part = {"name": name, "file": file, "sha256": sha256, "nbytes": nbytes, "state": {}}
        shards.append({**part, "lo": lo, "hi": hi})
    manifest = {
        "schema": "dlctl.checkpoint/1", "run_id": run.name, "job": "digits", "number": number,
        "step": step, "samples": step * 32, "at": time.time() - 41, "size": 6,
        "layout": [
            ["weight", "trained", [2, 2], "float32", ["tied"]],
            ["bias", "trained", [2], "float16", []],
        ],
        "algorithm": "downpour", "optimizer": "sgd", "shards": shards, "workers": [],
        "data": {"portions": []}, "evaluation": {"accuracy": 0.91}, "evaluation_step": step,
    }  # fmt: skip
    checkpoints.write_manifest(directory, manifest)
    return directory


def flip(shard: Path) -> None:
    """One bit of its values: the file is as long as before."""
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.fixture
def saved(run_directory) -> list[Path]:
    run = run_directory("digits-7f3a")
    return [save(run.path, 1000, 1), save(run.path, 2000, 2)]


def test_complete_checkpoints_are_listed(clock_stands, saved, dlctl_command, golden):
    code, out, _ = dlctl_command("checkpoint", "ls")
    assert code == 0
    golden("checkpoint-ls", out)
    assert dlctl_command("checkpoint", "ls", "-q").out.split() == [str(path) for path in saved]
    data = json.loads(dlctl_command("checkpoint", "ls", "--json").out)
    assert data["schema"] == "dlctl.checkpoints/1"
    assert [row["number"] for row in data["checkpoints"]] == [1, 2]
    assert data["checkpoints"][0]["at"].endswith("Z")


@pytest.mark.parametrize("form", ["new", "old"])
def test_an_evaluation_of_an_earlier_step_is_shown_with_it(saved, dlctl_command, form):
    manifest = checkpoints.read_manifest(saved[1]) | {"evaluation_step": 1990}
    if form == "old":
        del manifest["evaluation_step"]
        manifest["evaluation"]["step"] = 1990
    checkpoints.write_manifest(saved[1], manifest)
    out = dlctl_command("checkpoint", "ls").out
    assert " 1,990" in out.splitlines()[2]
    row = json.loads(dlctl_command("checkpoint", "ls", "--json").out)["checkpoints"][1]
    assert (row["evaluation"], row["evaluation_step"]) == ({"accuracy": 0.91}, 1990)


def test_a_checkpoint_whose_file_is_missing_or_cut_is_marked_without_hashing(
    saved, dlctl_command, golden
):
    (saved[0] / "shard-0.safetensors").unlink()
    shard = saved[1] / "shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    code, out, err = dlctl_command("checkpoint", "ls")
    assert (code, [line.count("damaged") for line in out.splitlines()]) == (0, [0, 1, 1])
    golden("checkpoint-ls-damaged", err)
    rows = json.loads(dlctl_command("checkpoint", "ls", "--json").out)["checkpoints"]
    assert [len(row["problems"]) for row in rows] == [1, 1]


def test_a_checkpoint_whose_manifest_is_damaged_is_not_passed_over_in_silence(saved, dlctl_command):
    (saved[1] / "manifest.json").write_text("{")
    code, out, err = dlctl_command("checkpoint", "ls")
    assert (code, len(out.splitlines())) == (0, 2)
    assert "000000002000-2/manifest.json" in err
    code, out, err = dlctl_command("checkpoint", "verify")
    assert (code, "bad  runs/digits-7f3a/ckpt/000000002000-2" in out) == (1, True)
    assert "1 of 2 " in err
    assert "next: dlctl checkpoint prune --damaged" in err


def test_a_run_without_checkpoints_says_so_and_why(run_directory, dlctl_command):
    error = "server-0: disk full"
    run_directory().run(checkpoint_error=error)
    code, out, err = dlctl_command("checkpoint", "ls")
    assert (code, out, error in err) == (0, "", True)
    assert dlctl_command("checkpoint", "verify").code == 4
    assert dlctl_command("checkpoint", "export", "-o", "x").code == 4


def test_every_byte_is_checked(saved, dlctl_command):
    assert dlctl_command("checkpoint", "verify").out.splitlines() == [
        "ok   runs/digits-7f3a/ckpt/000000001000-1",
        "ok   runs/digits-7f3a/ckpt/000000002000-2",
    ]
    shard = saved[1] / "shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    code, out, err = dlctl_command("checkpoint", "verify")
    assert code == 1
    assert "bad  runs/digits-7f3a/ckpt/000000002000-2" in out
    assert "shard-1.safetensors" in out
    assert "1 of 2 " in err
    assert dlctl_command("checkpoint", "verify", "1").code == 0
    assert dlctl_command("checkpoint", "verify", str(saved[1])).code == 1
    newest_good = dlctl_command("checkpoint", "verify", "latest")
    assert newest_good.out == "ok   runs/digits-7f3a/ckpt/000000001000-1\n"
    data = json.loads(dlctl_command("checkpoint", "verify", "2", "--json").out)
    assert (data["checkpoints"][0]["ok"], len(data["checkpoints"][0]["problems"])) == (False, 1)


def test_one_bit_that_has_changed_is_found_by_who_verifies_and_by_who_prunes(saved, dlctl_command):
    flip(saved[1] / "shard-1.safetensors")
    assert "damaged" not in dlctl_command("checkpoint", "ls").out, "a quick look cannot see that"
    code, out, err = dlctl_command("checkpoint", "verify")
    assert (code, "bad  runs/digits-7f3a/ckpt/000000002000-2" in out) == (1, True)
    assert "1 of 2 " in err
    ended = dlctl_command("checkpoint", "prune", "--damaged")
    assert (ended.code, ended.out) == (0, "removed  runs/digits-7f3a/ckpt/000000002000-2\n")
    assert [path.exists() for path in saved] == [True, False]


def test_a_checkpoint_that_was_removed_is_not_shown_as_the_newest_one(run_directory, dlctl_command):
    run = run_directory("digits-7f3a")
    good, bad = save(run.path, 1000, 1), save(run.path, 2000, 2)
    row = {"number": 2, "step": 2000, "path": str(bad), "at": time.time(), "nbytes": 9}
    run.run(checkpoint=row, state="stopped", step=2000)
    assert "step 2,000," in dlctl_command("status").rows["checkpoint"]
    (bad / "shard-1.safetensors").write_bytes(b"")
    assert dlctl_command("checkpoint", "prune", "--damaged").code == 0
    assert dlctl_command("status").rows["checkpoint"].endswith("/000000001000-1")
    assert json.loads(dlctl_command("status", "--json").out)["checkpoint"]["path"] == str(good)
    (good / "shard-1.safetensors").write_bytes(b"")
    assert dlctl_command("checkpoint", "prune", "--damaged").code == 0
    assert "checkpoint" not in dlctl_command("status").rows


def test_a_checkpoint_that_does_not_exist_is_named(saved, dlctl_command):
    unknown = dlctl_command("checkpoint", "verify", "9")
    assert (unknown.code, " 9" in unknown.err) == (4, True)
    nothing = dlctl_command("checkpoint", "verify", "runs")
    assert (nothing.code, "runs" in nothing.err) == (2, True)
    mistyped = dlctl_command("checkpoint", "verfiy")
    assert (mistyped.code, '"verify"' in mistyped.err) == (2, True)


def test_a_checkpoint_is_found_by_its_step_too(saved, dlctl_command):
    ended = dlctl_command("checkpoint", "verify", "2000")
    assert ended.out == "ok   runs/digits-7f3a/ckpt/000000002000-2\n"


def test_the_best_one_is_marked_found_and_kept(run_directory, dlctl_command):
    run = run_directory("digits-7f3a")
    job = json.loads((run.path / "job.json").read_text())
    job["checkpoints"]["best"] = "accuracy max"
    (run.path / "job.json").write_text(json.dumps(job))
    first, second, third = [save(run.path, 1000 * number, number) for number in (1, 2, 3)]
    rows = dlctl_command("checkpoint", "ls").out.splitlines()
    assert ["best" in row for row in rows] == [False, True, False, False]
    ended = dlctl_command("checkpoint", "prune", "--keep", "1")
    assert (ended.code, [path.exists() for path in (first, second, third)]) == (
        0, [True, False, True],
    )  # fmt: skip
    assert dlctl_command("checkpoint", "verify", "best").out.endswith("/000000001000-1\n")


def test_where_nothing_is_said_to_be_good_nothing_is_the_best(saved, dlctl_command):
    code, _, err = dlctl_command("checkpoint", "export", "best")
    assert (code, 'best = "val_loss min"' in err) == (4, True)


def test_pruning_shows_first_what_it_would_remove(saved, dlctl_command):
    would = dlctl_command("checkpoint", "prune", "--keep", "1", "--dry-run")
    assert (would.code, would.out.split()[-1]) == (0, "runs/digits-7f3a/ckpt/000000001000-1")
    assert all(path.exists() for path in saved)
    ended = dlctl_command("checkpoint", "prune", "--keep", "1", "--json")
    data = json.loads(ended.out)
    assert (data["removed"], data["dry_run"]) == ([str(saved[0])], False)
    assert [path.exists() for path in saved] == [False, True]
    again = dlctl_command("checkpoint", "prune", "--keep", "1")
    assert (again.code, again.out) == (0, "")
    assert saved[1].exists()


def test_pruning_keeps_the_newest_good_one_and_the_one_that_is_being_written(
    saved, dlctl_command, golden
):
    (saved[1] / "shard-1.safetensors").write_bytes(b"damaged")
    writing = checkpoints.create(saved[0].parents[1], 3000, 3)
    ended = dlctl_command("checkpoint", "prune", "--keep", "1")
    assert (ended.code, ended.out) == (0, "")
    assert [path.exists() for path in (*saved, writing)] == [True, True, True]
    golden("checkpoint-prune-kept", ended.err)


def test_a_damaged_one_does_not_count_as_one_that_is_kept(saved, dlctl_command):
    run = saved[0].parents[1]
    newest = save(run, 3000, 3)
    (saved[1] / "shard-1.safetensors").write_bytes(b"damaged")
    ended = dlctl_command("checkpoint", "prune", "--keep", "2")
    assert (ended.code, ended.out) == (0, "")
    assert "dlctl checkpoint prune --damaged" in ended.err
    ended = dlctl_command("checkpoint", "prune", "--keep", "1", "--damaged")
    assert len(ended.out.splitlines()) == 2
    assert [path.exists() for path in (*saved, newest)] == [False, False, True]


def test_pruning_removes_what_is_damaged_if_it_is_told_to_and_nothing_else(saved, dlctl_command):
    (saved[1] / "shard-1.safetensors").write_bytes(b"damaged")
    writing = checkpoints.create(saved[0].parents[1], 3000, 3)
    would = dlctl_command("checkpoint", "prune", "--damaged", "--dry-run")
    assert would.out.endswith("  runs/digits-7f3a/ckpt/000000002000-2\n")
    assert saved[1].exists()
    ended = dlctl_command("checkpoint", "prune", "--damaged")
    assert (ended.code, ended.out) == (0, "removed  runs/digits-7f3a/ckpt/000000002000-2\n")
    assert [path.exists() for path in (*saved, writing)] == [True, False, True]


@pytest.mark.parametrize("arguments", [(), ("--keep", "0"), ("--keep", "all")])
def test_pruning_needs_to_know_how_many_to_keep(saved, dlctl_command, arguments):
    assert dlctl_command("checkpoint", "prune", *arguments).code == 2
    assert all(path.exists() for path in saved)


def test_the_newest_good_checkpoint_is_exported_for_torch(saved, own_place, dlctl_command):
    shard = saved[1] / "shard-1.safetensors"
    shard.write_bytes(b"damaged")
    code, out, err = dlctl_command("checkpoint", "export", "-o", "model.safetensors")
    assert code == 0, err
    assert out.endswith(" runs/digits-7f3a/ckpt/000000001000-1\n")
    assert "000000002000-2/shard-1.safetensors" in err
    tensors = load_file(own_place / "model.safetensors")
    assert set(tensors) == {"weight", "tied", "bias"}
    np.testing.assert_array_equal(tensors["tied"], [[0, 1], [2, 3]])
    assert tensors["bias"].dtype == np.float16


@pytest.mark.long
def test_an_export_goes_to_standard_output_and_into_a_fifo(saved, own_place):
    words = [sys.executable, "-m", "dlctl", "checkpoint", "export", "-o"]
    done = subprocess.run([*words, "-"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(load(done.stdout)) == {"weight", "tied", "bias"}
    assert done.stderr == b"/dev/stdout  from runs/digits-7f3a/ckpt/000000002000-2\n"
    os.mkfifo(own_place / "model.pt")
    with subprocess.Popen([*words, "model.pt"], stdout=subprocess.PIPE) as writing:
        content = io.BytesIO((own_place / "model.pt").read_bytes())
        said = writing.communicate()[0]
    assert said == b"model.pt  from runs/digits-7f3a/ckpt/000000002000-2\n"
    assert set(torch.load(content, weights_only=True)) == {"weight", "tied", "bias"}
    assert (own_place / "model.pt").is_fifo()
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run([*words, "-"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (closed.returncode, closed.stderr) == (141, b"")


def test_an_export_that_fails_passes_the_reason_on(saved, own_place, dlctl_command):
    ended = dlctl_command("checkpoint", "export", "1", "-o", "nowhere/model.pt")
    assert (ended.code, ended.out) == (2, "")
    assert (ended.where, ended.next) == ("nowhere/model.pt", "mkdir -p nowhere")


@pytest.mark.long
def test_an_export_is_called_after_the_job_and_the_step_and_never_overwrites(
    saved, own_place, dlctl_command
):
    code, out, err = dlctl_command("checkpoint", "export")
    assert code == 0, err
    file = own_place / "digits-2000.safetensors"
    assert out.startswith(f"{file.name}  ")
    file.write_bytes(b"theirs")
    again = dlctl_command("checkpoint", "export")
    assert (again.code, again.out) == (1, "")
    assert [text in again.err for text in (file.name, "--force")] == [True, True]
    assert file.read_bytes() == b"theirs"
    assert dlctl_command("checkpoint", "export", "--force").code == 0
    assert set(load_file(file)) == {"weight", "tied", "bias"}


@pytest.mark.long
def test_the_name_in_a_stranger_s_manifest_leads_nowhere_else(saved, own_place, dlctl_command):
    path = saved[0] / "manifest.json"
    known = manifest.parse(path.read_bytes(), str(path))
    path.write_bytes(manifest.serialise({**known, "job": "../../x"}, str(path)))
    code, out, err = dlctl_command("checkpoint", "export", str(saved[0]))
    assert code == 0, err
    assert out.startswith("model-1000.safetensors  ")
    assert not (own_place.parent.parent / "x-1000.safetensors").exists()


def test_a_process_that_ends_without_an_error_in_json_is_quoted(saved, own_place, dlctl_command):
    """A bug, or a signal: whatever it said is better than nothing."""
    words = "Traceback ...\nKeyError: 'x'\n"
    crashed = other_process.error_of(words, 1, saved[0], "failed")
    assert crashed.message.endswith(words.strip())
    killed = other_process.error_of("", -9, saved[0], "failed")
    assert "SIGKILL" in killed.message
