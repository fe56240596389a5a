"""`plan` says what `start` does then; it changes nothing, and asks no host unless told to."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dead_runs import keep, remember, save
from stand_in_jobs import JOB, the_run

from dlctl.job.settings import of_job
from dlctl.ops import cases, plan
from dlctl.ops.changes import KeyChange
from dlctl.ops.decide import START, Action
from dlctl.runs import kept_shards
from dlctl.runs.database import RunDb

HOSTS = """
[[hosts]]
workers = 1
[[hosts]]
ssh = "nowhere.invalid"
data = "10.1.1.1"
[network]
port = 7000
address = "127.0.0.1"
"""


@pytest.fixture
def earlier(run_directory, job: Path, own_place: Path):
    """Makes a run that this job file has been once: `earlier(state="failed")`."""
    from dlctl import jobfile
    from dlctl.job import config

    run = run_directory("quick-51a9")
    content = config.to_dict(jobfile.load(job))
    (run.path / "job.json").write_text(json.dumps(content))
    yield lambda **values: run.run(name="quick", job_file=str(own_place / job.name), **values)
    kept_shards.remove(run.path, config.Servers())


def planned(dlctl_command, *options: str) -> dict[str, Any]:
    code, out, _ = dlctl_command("plan", "job.toml", "--json", *options)
    assert code == 0
    return json.loads(out)


def everything(place: Path) -> dict[str, bytes]:
    """All files, and their content."""
    return {str(p): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def test_a_job_without_a_run_would_begin_one_and_nothing_is_made(
    job, own_place, dlctl_command, golden
):
    before = everything(own_place)
    plan = planned(dlctl_command)
    assert (plan["way"], plan["has_changes"], plan["run_id"]) == ("begin", True, None)
    assert [row["name"] for row in plan["daemons"]] == [
        "coordinator", "agent-0", "server-0", "worker-0", "worker-1",
    ]  # fmt: skip
    assert plan["model"] is None
    assert plan["files"]["run directory"] == str(own_place / "runs" / "quick-XXXX")
    code, out, _ = dlctl_command("plan", "job.toml")
    assert code == 0
    golden("plan", out)
    assert everything(own_place) == before
    assert not (own_place / "runs").exists()


def test_a_job_that_runs_is_left_alone_and_what_can_change_live_is_said(job, play, dlctl_command):
    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    assert planned(dlctl_command)["way"] == "alive"
    assert dlctl_command("plan", "job.toml", "--detailed-exitcode").code == 0
    job.write_text(JOB.replace("count = 2", "count = 3").replace("lr = 0.1", "lr = 0.2"))
    plan = planned(dlctl_command)
    assert plan["way"] == "changed"
    assert {row["change"]: row["live"] for row in plan["changes"]} == {
        "optimizer.lr: 0.1 -> 0.2": "dlctl set lr=0.2",
        "workers.count: 2 -> 3": "dlctl scale worker=3",
    }
    code, out, _ = dlctl_command("plan", "job.toml", "--detailed-exitcode")
    assert (code, "start refuses" in out) == (10, True)
    fresh = dlctl_command("plan", "--fresh", "job.toml")
    assert fresh.code == 2


def test_a_stopped_job_would_resume_and_then_it_does(job, own_place, play, dlctl_command):
    play("start", "ready", "forever")
    dlctl_command("start", "job.toml")
    assert dlctl_command("stop").code == 0
    run = the_run(own_place)
    before = everything(own_place / "runs")
    plan = planned(dlctl_command)
    assert (plan["way"], plan["run_id"]) == ("resume", run["run_id"])
    assert plan["checkpoint_step"] == 50
    assert everything(own_place / "runs") == before
    ended = dlctl_command("plan", "job.toml", "--detailed-exitcode")
    assert ended.code == 10
    assert f"{run['run_id']} resumes from step 50" in ended.out
    assert planned(dlctl_command, "--fresh")["way"] == "begin"
    assert dlctl_command("start", "job.toml").code == 0
    assert the_run(own_place)["resume"] == run["checkpoint"]["path"]


def test_a_job_that_has_reached_its_goal_has_nothing_to_do(earlier, dlctl_command):
    run = earlier(state="finished")
    save(run, step=90, number=1)
    plan = planned(dlctl_command)
    assert (plan["way"], plan["has_changes"]) == ("over", False)
    assert plan["model"] == {
        "parameters": 3,
        "stored_bytes": plan["model"]["stored_bytes"],
        "step": 90,
    }
    (server,) = [row for row in plan["daemons"] if row["name"] == "server-0"]
    assert (server["parameters"], server["size_bytes"]) == (3, plan["model"]["stored_bytes"])


def test_a_failed_run_that_has_lost_nothing_would_go_on_where_it_was(earlier, dlctl_command):
    run = earlier(state="failed", step=90)
    keep(run, 0, version=7, deliveries=[])
    remember(run, "server-0", state="running", step=90)
    plan = planned(dlctl_command)
    assert (plan["way"], plan["run_id"]) == ("go on", "quick-51a9")
    assert json.loads(dlctl_command("plan", "--json", "job.toml").out)["way"] == "go on"


def test_damaged_checkpoints_are_said_as_start_says_them(earlier, dlctl_command):
    run = earlier(state="stopped", step=90)
    good, bad = save(run, step=40, number=1), save(run, step=90, number=2)
    (bad / "shard-0.safetensors").write_bytes(b"")
    assert planned(dlctl_command)["checkpoint_step"] == 40
    assert "warning: " in dlctl_command("plan", "job.toml").err
    (good / "shard-0.safetensors").write_bytes(b"")
    code, _, err = dlctl_command("plan", "job.toml")
    assert (code, "shard-0.safetensors" in err) == (1, True)


def test_other_hosts_are_placed_without_asking_them(job, dlctl_command):
    job.write_text(JOB.replace("[workers]", "[servers]\ncount = 2\n[workers]") + HOSTS)
    plan = planned(dlctl_command)
    assert {row["name"]: (row["host"], row["address"], row["port"]) for row in plan["daemons"]} == {
        "coordinator": ("this machine", "127.0.0.1", 7000),
        "agent-0": ("this machine", "", None),
        "agent-1": ("nowhere.invalid", "", None),
        "server-0": ("this machine", "127.0.0.1", 7001),
        "server-1": ("nowhere.invalid", "10.1.1.1", 7002),
        "worker-0": ("this machine", "", None),
        "worker-1": ("nowhere.invalid", "", None),
    }
    ended = dlctl_command("plan", "job.toml", "--check")
    assert ended.code == 1
    assert "nowhere.invalid" in ended.out
    assert "next: dlctl doctor job.toml" in ended.err


@pytest.mark.parametrize(
    ("key", "after", "live"),
    [
        ("workers.count", 8, "dlctl scale worker=8"),
        ("limits.push", "5MB/s", "dlctl set push=5MB/s"),
        ("limits.push", "5 MB/s", "dlctl set 'push=5 MB/s'"),
        ("compression.density", 0.1, "dlctl set density=0.1"),
        ("algorithm.push_every_steps", 16, "dlctl set push_every_steps=16"),
        ("algorithm.push_every_steps", "auto", "dlctl set push_every_steps=auto"),
        ("algorithm.comm_share_max", 0.2, ""),
        ("servers.count", 2, ""),
        ("job.seed", 2, ""),
        ("workers.lr", 2, ""),
        ("optimizer.lr", None, ""),
    ],
)
def test_what_changes_live_is_what_dlctl_set_and_scale_can_do(key, after, live) -> None:
    job = {
        "algorithm": {"name": "downpour", "options": {}},
        "compression": {"name": "topk", "options": {}},
        "optimizer": {"name": "sgd", "options": {}},
    }
    assert KeyChange(key, 1, after, of_job(job).called(key)).how_live() == live


def test_what_was_changed_live_is_compared_and_not_what_it_was_started_with(
    job, own_place, play, dlctl_command
):
    """The records are as the coordinator's after `dlctl set lr=0.2` and so on."""

    def changes(text: str) -> dict[str, str]:
        job.write_text(text)
        plan = planned(dlctl_command)
        code = dlctl_command("plan", "job.toml", "--detailed-exitcode").code
        assert (code, plan["has_changes"]) == ((10, True) if plan["changes"] else (0, False))
        return {row["change"]: row["live"] for row in plan["changes"]}

    play("start", "ready", "forever")
    assert dlctl_command("start", "job.toml").code == 0
    directory = Path(the_run(own_place)["directory"])
    new = JOB.replace("count = 2", "count = 3").replace("lr = 0.1", "lr = 0.2")
    new += '[limits]\npush = "5MB/s"\n'
    assert len(changes(new)) == 3
    with closing(RunDb(directory)) as db:
        for name in ("server-0", "worker-2"):
            db.put_daemon(name, {"name": name, "role": name[:6], "state": "running"})
        own = {f"worker-{i}": {"push": 5e6} for i in range(3)}
        db.put_run(settings={"server-0": {"lr": 0.2}, **own})
        db.commit()
        assert changes(new) == {}
        assert dlctl_command("start", "job.toml").code == 0
        assert changes(JOB) == {
            "optimizer.lr: 0.2 -> 0.1": "dlctl set lr=0.1",
            "workers.count: 3 -> 2": "dlctl scale worker=2",
            'limits.push: "5 MB/s" -> "off"': "dlctl set push=off",
        }
        assert dlctl_command("start", "job.toml").code == 0
        db.put_run(settings={"server-0": {"lr": 0.2}, "worker-1": {"push": 5e6}})
        db.commit()
        assert list(changes(new)) == ['limits.push: ["off", "5 MB/s"] -> "5MB/s"']
        own = {name: {"push": 5e6, "push_every_steps": "auto"} for name in own}
        db.put_run(settings={"server-0": {"lr": 0.2}, **own})
        db.commit()
        key = "algorithm.push_every_steps"
        assert changes(new) == {f'{key}: "auto" -> 1': "dlctl set push_every_steps=1"}
        auto = '[algorithm]\nname = "downpour"\npush_every_steps = "auto"\n'
        assert changes(new + auto) == {}


def test_whatever_start_would_do_has_words() -> None:
    shown = {*cases.HEADLINES, *plan.SHOWN, Action.REFUSE_SECOND, Action.REFUSE_DAMAGED}
    assert {action for _, action in START if not action.is_look} == shown


def test_the_model_is_built_for_the_sizes_of_a_job_that_never_ran(
    own_place: Path, dlctl_command: Any
) -> None:
    text = (
        "import torch\nclass Task:\n    def model(self):\n        return torch.nn.Linear(30, 20)\n"
        "    def dataset(self):\n        raise RuntimeError('no data is loaded')\n"
        "    def loss(self, model, batch):\n        return model(batch).sum()\ntask = Task()\n"
    )
    (own_place / "train.py").write_text(text)
    (own_place / "job.toml").write_text(
        '[job]\nname = "sized"\ntask = "train.py:task"\n[optimizer]\nname = "soap"\nmax_dim = 25\n'
        "[servers]\ncount = 2\nweights = [1, 1]\n"
    )
    found = planned(dlctl_command, "--model")
    servers = [row for row in found["daemons"] if row["name"].startswith("server")]
    assert [row["parameters"] for row in servers] == [600, 20]
    assert [row["matrix_bytes"] for row in servers] == [4 * 2 * 20**2, 0]
    assert [row["size_bytes"] for row in servers] == [12 * 600 + 4 * 2 * 20**2, 12 * 20]
    assert len(found["remarks"]) == 1
    assert "30" in found["remarks"][0]
    assert planned(dlctl_command)["model"] is None


@pytest.mark.long
def test_with_parties_the_sizes_are_those_of_both_sides(
    own_place: Path, dlctl_command: Any
) -> None:
    assert dlctl_command("init", "--example", "split").code == 0
    found = planned(dlctl_command, "--model")
    servers = [row for row in found["daemons"] if row["name"].startswith("server")]
    clinic, lab = 128 * (64 + 1) + 10 * (64 + 1), 64 * (128 + 1)
    assert [row["parameters"] for row in servers] == [clinic, lab]
