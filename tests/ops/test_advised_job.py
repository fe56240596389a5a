"""What `dlctl advise --write` does to a job file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlctl import jobfile
from dlctl.errors import UsageError
from dlctl.health import memory
from dlctl.health.needs import Model
from dlctl.jobfile.rewriting import retabled
from dlctl.ops import advise
from dlctl.sim.objectives import layout_of
from dlctl.sim.request import LinkSpeed
from dlctl.util.hostnames import HERE

Json = dict[str, Any]
TEXT = """# mine
[job]
name = "digits"   # a name
task = "train.py:task"
stop = { epochs = 2 }

[algorithm]
name = "downpour"
push_every_steps = 2

# what is pushed
[compression]
name = "topk"
density = 0.05

[workers]
count = 2   # two
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("task = None\n")
    found = tmp_path / "job.toml"
    found.write_text(TEXT)
    return found


def advised(file: Path, method: str, **tuned: Any) -> Any:
    values = {key.replace("__", "."): value for key, value in tuned.items()}
    return written(file, method, values, {})


def written(file: Path, method: str, tuned: Json, changes: Json) -> Any:
    """The job of the file after that advice. changes: what --set said."""
    advise.write(file, {"tuned": {method: tuned}, "plan": {"changes": changes}}, method)
    return jobfile.load(file)


def test_another_method_replaces_its_own_sections_and_nothing_else(file: Path) -> None:
    job = advised(file, "diloco", algorithm__local_steps=30, inner__lr=0.002)
    assert (job.algorithm.name, job.algorithm.options["local_steps"]) == ("diloco", 30)
    assert job.inner.options["lr"] == 0.002
    assert job.compression.name != "topk"
    text = file.read_text()
    assert "push_every_steps" not in text
    for kept in ("# mine", '"digits"   # a name', "# what is pushed", "count = 2   # two"):
        assert kept in text


def test_its_own_method_gets_the_tuned_values_in_place(file: Path) -> None:
    job = advised(file, "downpour", algorithm__push_every_steps=6, optimizer__lr=0.1)
    assert job.algorithm.options["push_every_steps"] == 6
    assert job.optimizer.options["lr"] == 0.1
    assert (job.compression.name, job.compression.options["density"]) == ("topk", 0.05)


def test_a_method_without_servers_and_back(file: Path) -> None:
    job = advised(file, "allreduce", inner__lr=0.05)
    assert (job.algorithm.name, job.servers.count) == ("allreduce", 0)
    job = advised(file, "sync+int8", optimizer__lr=0.2)
    assert (job.servers.count, job.compression.name) == (1, "int8")


@pytest.mark.parametrize("method", ["downpour", "diloco", "allreduce"])
def test_the_job_that_was_simulated_is_written_with_the_values_that_were_set(
    file: Path, method: str
) -> None:
    changes = {"workers.batch_size": 4, "job.stop.epochs": 3, "workers.count": 3, "inner.lr": 0.5}
    job = written(file, method, {"inner.lr": 0.25}, changes)
    assert (job.algorithm.name, job.workers.batch_size, job.workers.count) == (method, 4, 3)
    assert (job.job.stop.epochs, job.inner.options["lr"]) == (3, 0.25)
    assert 'name = "digits"   # a name' in file.read_text()


def test_a_method_s_own_option_that_was_set_is_written_beside_the_tuned_ones(file: Path) -> None:
    job = written(file, "diloco", {"inner.lr": 0.25}, {"algorithm.local_steps": 7})
    assert job.algorithm.options["local_steps"] == 7
    inner = {"name": "sgd", "lr": 0.5}
    job = written(file, "diloco", {"inner.lr": 0.125}, {"inner": inner})
    assert (job.inner.name, job.inner.options["lr"]) == ("sgd", 0.125)


def test_a_set_value_that_cannot_be_written_is_told_and_changes_nothing(file: Path) -> None:
    before = file.read_text()
    with pytest.raises(UsageError):
        written(file, "downpour", {}, {"job.stop": {"epochs": 3, "steps": 9}})
    assert file.read_text() == before


def test_a_job_that_names_no_method_keeps_its_values_for_the_default_one(file: Path) -> None:
    file.write_text(TEXT.replace('[algorithm]\nname = "downpour"\npush_every_steps = 2', "", 1))
    job = advised(file, "downpour", optimizer__lr=0.1)
    assert (job.compression.name, job.compression.options["density"]) == ("topk", 0.05)
    assert job.optimizer.options["lr"] == 0.1


def test_what_cannot_be_changed_is_left_as_it_is(file: Path) -> None:
    file.write_text(TEXT.replace('[algorithm]\nname = "downpour"\npush_every_steps = 2\n', "", 1)
                    .replace("# mine", 'algorithm = { name = "downpour" }', 1))  # fmt: skip
    before = file.read_text()
    with pytest.raises(UsageError):
        advised(file, "diloco", inner__lr=0.002)
    assert file.read_text() == before
    assert [path.name for path in file.parent.glob(".*")] == []


TASK = """
import torch
class Task:
    def model(self):
        return torch.nn.Linear(30, 20)
    def dataset(self):
        raise RuntimeError("no data is loaded")
    def loss(self, model, batch):
        return model(batch).sum()
task = Task()
"""


@pytest.mark.long
def test_a_job_that_never_ran_gets_methods_that_send_less_over_slow_links(file: Path) -> None:
    (file.parent / "train.py").write_text(TASK)
    job, link = jobfile.load(file), LinkSpeed(bytes_per_s=1000.0, latency_s=0.01)
    assert "sparseloco" in advise._shortlist(job, advise._model(file, job), link)


def test_a_private_file_stays_private_and_a_link_stays_a_link(file: Path) -> None:
    file.chmod(0o600)
    link = file.with_name("linked.toml")
    link.symlink_to(file)
    assert advised(link, "diloco", inner__lr=0.002).algorithm.name == "diloco"
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "diloco" in file.read_text()


def test_a_table_in_the_middle_is_replaced_and_one_is_removed() -> None:
    text = "[a]\nx = 1\n[b]\ny = 2\n[b.c]\nz = 3\n\n# of d\n[d]\nw = 4\n"
    assert retabled(text, {"b": {"v": [1, 2.5]}}) == (
        "[a]\nx = 1\n[b]\nv = [1, 2.5]\n\n# of d\n[d]\nw = 4\n"
    )
    assert retabled(text, {"b": None}) == "[a]\nx = 1\n\n# of d\n[d]\nw = 4\n"
    assert retabled("[a]\nx = 1\n", {"e": {"t": "s"}}) == '[a]\nx = 1\n\n[e]\nt = "s"\n'


def test_memory_grows_with_the_model_the_workers_and_what_they_keep(file: Path) -> None:
    model = Model(layout_of(50_000_000), 400_000_000, None)

    def needed(**changes: Any) -> int:
        job = jobfile.load(file, {key.replace("__", "."): value for key, value in changes.items()})
        found = memory.of_job(job, model, {HERE: 3 << 30})
        assert set(found) == {HERE}
        assert found[HERE].is_enough == (found[HERE].needed_bytes <= 3 << 30)
        return found[HERE].needed_bytes

    two, four = needed(), needed(workers__count=4)
    assert four - two == 2 * ((400 << 20) + 2 * 4 * 50_000_000)
    adam = {"name": "adam", "lr": 0.001}
    assert needed(inner=adam) - two == 2 * 2 * 4 * 50_000_000


def test_a_method_for_which_a_host_has_too_little_memory_is_refused(file: Path) -> None:
    found = {HERE: memory.HostMemory(4 << 30, 3 << 30)}
    with pytest.raises(UsageError, match="memory"):
        advise.check_memory(found)
    advise.check_memory({HERE: memory.HostMemory(4 << 30, None)})
