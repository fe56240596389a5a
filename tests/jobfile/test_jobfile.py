"""Job files: what is right is read, what is wrong is said, all of it, with its line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_counts import times
from golden import Golden
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from dlctl import jobfile, registry
from dlctl.errors import UsageError
from dlctl.job.config import Choice
from dlctl.jobfile import JobFileError
from dlctl.jobfile.positions import find_keys
from dlctl.util import regular

MINIMAL = '[job]\nname = "digits"\ntask = "train.py:task"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("raise SystemExit('a task is never imported here')\n")
    return tmp_path


def written(folder: Path, text: str | bytes, name: str = "job.toml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path) -> JobFileError:
    with pytest.raises(JobFileError) as caught:
        jobfile.load(path)
    assert caught.value.exit_code == 2
    return caught.value


def test_what_does_not_go_with_the_method_is_named_by_both_lines(folder: Path) -> None:
    text = f'{MINIMAL}[algorithm]\nname = "sandblaster"\n[compression]\nname = "topk"\n'
    method, other = refusal(written(folder, text)).problems
    assert (method.key, other.key) == ("algorithm.name", "compression.name")
    assert [each.line for each in (method, other)] == [5, 7]


def only_problem(folder: Path, text: str) -> jobfile.JobFileProblem:
    """But for the line of a method that it does not go with."""
    problems = refusal(written(folder, text)).problems
    problems = [each for each in problems if " does not go with " not in each.message]
    assert len(problems) == 1, problems
    return problems[0]


def shown_fault(text: str, problem: jobfile.JobFileProblem) -> str:
    """A fault as it stands in a golden file: what was written, and what is said about which key."""
    message = "; ".join(filter(None, (problem.message, problem.suggestion)))
    return f"{text}\n    {problem.key}: {message}\n"


def named(problem: jobfile.JobFileProblem) -> list[str]:
    """What the suggestion has in quotes: the names that may have been meant."""
    return re.findall(r'"([^"]+)"', problem.suggestion)


# ---------------------------------------------------------------- what is right


def test_two_keys_are_a_job_and_everything_else_has_a_default(folder: Path) -> None:
    job = jobfile.load(written(folder, MINIMAL))
    assert (job.job.name, job.job.stop.epochs) == ("digits", 1)
    assert job.job.task == str(folder.resolve() / "train.py:task")
    assert (job.algorithm.name, job.optimizer.name, job.compression.name) == (
        "downpour",
        "sgd",
        "none",
    )


def test_options_come_out_complete_so_that_daemons_need_no_check(folder: Path) -> None:
    text = MINIMAL + '[algorithm]\nname = "downpour"\nfetch_every_steps = 4\n'
    job = jobfile.load(written(folder, text))
    options = registry.load("algorithms", "downpour").Options(**job.algorithm.options)
    assert options.fetch_every_steps == 4
    assert job.algorithm.options == dataclasses.asdict(options)
    optimizer = registry.load("optimizers", "sgd").Options(**job.optimizer.options)
    assert job.optimizer.options == dataclasses.asdict(optimizer)


def test_an_interval_is_a_number_or_automatic(folder: Path) -> None:
    text = MINIMAL + '[algorithm]\nname = "downpour"\npush_every_steps = "auto"\n'
    options = jobfile.load(written(folder, text)).algorithm.options
    assert (options["push_every_steps"], options["fetch_every_steps"]) == ("auto", 1)
    assert (options["comm_share_max"], options["auto_steps_max"]) == (0.1, 64)


NO_INTERVALS = [
    '"fast"',
    '"Auto"',
    "0",
    "-1",
    "1.5",
    "true",
    "[1]",
    "{ n = 1 }",
]


def test_what_an_interval_cannot_be_is_told_once_with_all_that_it_can_be(
    folder: Path, golden: Golden
) -> None:
    screens = []
    for value in NO_INTERVALS:
        text = f'{MINIMAL}[algorithm]\nname = "downpour"\nfetch_every_steps = {value}\n'
        problem = only_problem(folder, text)
        assert (problem.line, problem.key) == (6, "algorithm.fetch_every_steps")
        screens.append(shown_fault(f"fetch_every_steps = {value}", problem))
    golden("jobfile-intervals", "\n".join(screens))


@pytest.mark.parametrize(
    "line", ["comm_share_max = 1.0", "comm_share_max = 0", "auto_steps_max = 0"]
)
def test_the_bounds_of_automatic_intervals_have_bounds(folder: Path, line: str) -> None:
    text = MINIMAL + f'[algorithm]\nname = "downpour"\n{line}\n'
    (problem,) = refusal(written(folder, text)).problems
    assert problem.key == f"algorithm.{line.split()[0]}"


def test_a_whole_number_will_do_where_a_number_is_wanted(folder: Path) -> None:
    text = MINIMAL + "[timeouts]\nready_s = 60\n[optimizer]\nname = 'sgd'\nlr = 1\n"
    job = jobfile.load(written(folder, text))
    assert (job.timeouts.ready_s, job.optimizer.options["lr"]) == (60.0, 1.0)


def test_a_byte_order_mark_and_windows_line_ends_are_no_problem(folder: Path) -> None:
    text = b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()
    assert jobfile.load(written(folder, text)).job.name == "digits"


def test_overrides_win_over_the_file(folder: Path) -> None:
    path = written(folder, MINIMAL + "[workers]\ncount = 2\n")
    job = jobfile.load(path, {"workers.count": 8, "limits.push": "5MB/s"})
    assert (job.workers.count, job.limits.push) == (8, "5MB/s")


def test_a_wrong_override_is_not_blamed_on_the_line_it_replaces(folder: Path) -> None:
    path = written(folder, MINIMAL + "[workers]\ncount = 2\n")
    with pytest.raises(JobFileError) as caught:
        jobfile.load(path, {"workers.count": 0})
    (problem,) = caught.value.problems
    assert (problem.key, problem.source) == ("workers.count", "[workers]")
    assert "count = 2" not in caught.value.message


def test_effective_options_fill_in_the_defaults_of_an_entry() -> None:
    found = jobfile.effective_options("compressors", Choice(name="topk", options={"density": 0.5}))
    assert found["density"] == 0.5
    assert set(found) == {
        f.name for f in dataclasses.fields(registry.load("compressors", "topk").Options)
    }


def test_effective_options_refuse_what_the_entry_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"topk.*dense"):
        jobfile.effective_options("compressors", Choice(name="topk", options={"dense": True}))


# ---------------------------------------------------------------- how it is shown


def test_the_report_shows_every_problem_with_its_line_and_a_suggestion(
    folder: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.chdir(folder)
    text = MINIMAL + '\n[servers]\ncount = 0\nrate_limit = "100MB/s"\n\n[limit]\npush = "off"\n'
    written(folder, text)
    golden("jobfile", refusal(Path("job.toml")).message)


@pytest.mark.parametrize(
    ("method", "section", "wrong", "of_method"),
    [
        ("downpour", "[servers]\ncount = 0", "downpour", "1"),
        ("toy-ring", "[servers]\ncount = 2", "toy-ring", "0"),
        ("toy-ring", "[workers]\ncount = 513", "512", "512"),
    ],
)
def test_what_a_method_cannot_do_with_is_said_at_both_of_its_lines(
    folder: Path, method: str, section: str, wrong: str, of_method: str
) -> None:
    text = f'{MINIMAL}[algorithm]\nname = "{method}"\n{section}\n'
    at_method, at_count = refusal(written(folder, text)).problems
    assert (at_method.line, at_method.key) == (5, "algorithm.name")
    assert of_method in at_method.message
    assert at_count.line == 7
    assert at_count.key.endswith(".count")
    assert wrong in at_count.message


@pytest.mark.parametrize(("method", "count"), [("toy-ring", 512), ("downpour", 513)])
def test_as_many_workers_as_a_method_can_have_are_fine(
    folder: Path, method: str, count: int
) -> None:
    text = f'algorithm.name = "{method}"\nworkers.count = {count}\n{MINIMAL}'
    assert jobfile.load(written(folder, text)).workers.count == count


def test_faults_of_all_kinds_are_reported_at_once(folder: Path) -> None:
    text = """
[job]
name = "Fashion MNIST"
task = "trian.py:task"
stop = { epochs = 0, target = "accuracy => 3" }
[algorithm]
name = "downpuor"
[optimizer]
name = "adagrad"
lr = -1
[compression]
name = "topk"
denstiy = 0.01
[workers]
batch_size = "4"
[limits]
push = "5"
[network]
port = 7000
[timeouts]
ready_s = nan
"""
    problems = refusal(written(folder, text)).problems
    assert {(p.line, p.key) for p in problems} == {
        (3, "job.name"),
        (4, "job.task"),
        (5, "job.stop.epochs"),
        (5, "job.stop.target"),
        (7, "algorithm.name"),
        (10, "optimizer.lr"),
        (13, "compression.denstiy"),
        (15, "workers.batch_size"),
        (17, "limits.push"),
        (19, "network.port"),
        (21, "timeouts.ready_s"),
    }
    assert [p.line for p in problems] == sorted(p.line or 0 for p in problems)
    meant = {p.key: named(p) for p in problems}
    assert meant["job.name"] == ["fashion-mnist"]
    assert meant["job.task"] == ["train.py:task"]
    assert meant["algorithm.name"] == ["downpour"]
    assert meant["compression.denstiy"] == ["density"]


def test_a_hostile_line_cannot_steer_the_terminal(folder: Path) -> None:
    text = MINIMAL + '"k\\u001b[31m" = 1\nname2 = "\u202etxet"\n'
    message = refusal(written(folder, text)).message
    assert "\u202e" not in message
    assert "\x1b" not in message
    assert r"\u202e" in message


def test_a_line_too_long_for_a_terminal_is_cut_around_the_fault(folder: Path) -> None:
    text = MINIMAL.replace("[job]", "job.stop = {" + " " * 5000 + "epoch = 1}\n[job]")
    text = text.replace("[job]\n", "").replace("name", "job.name").replace("task =", "job.task =")
    message = refusal(written(folder, text)).message
    assert max(map(len, message.split("\n"))) < 250
    assert re.search(r' \^{5} .*"epochs"', message)


# ---------------------------------------------------------------- files that cannot be read


def large(folder: Path) -> Path:
    with (folder / "large.toml").open("wb") as file:
        file.truncate(1 << 40)  # More than the memory.
    return folder / "large.toml"


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo.toml")
    return folder / "fifo.toml"


UNREADABLE: list[Callable[[Path], Path]] = [
    lambda folder: folder / "jop.toml",
    lambda folder: folder,
    lambda folder: written(folder, " \n\n", "empty.toml"),
    large,
    fifo,
    lambda folder: Path("a\0b"),
    lambda folder: written(folder, b'[job]\nname = "d\xe9j\xe0"\n', "latin.toml"),
]


def test_what_cannot_be_read_is_told_by_its_kind(folder: Path, golden: Golden) -> None:
    """Nothing is waited for, or read into memory; a similar file is named."""
    written(folder, MINIMAL)
    errors = [refusal(make(folder)) for make in UNREADABLE]
    missing, directory, *_, latin = (error.problems[0] for error in errors)
    assert {Path(name).name for each in (missing, directory) for name in named(each)} == {
        "job.toml"
    }
    assert latin.line == 2
    golden("jobfile-unreadable", "\n\n".join(error.message for error in errors))


def test_a_file_that_may_not_be_read_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> int:  # root, as in many containers, may read everything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    path = written(folder, MINIMAL)
    monkeypatch.setattr(regular, "descriptor", refuse)
    assert os.strerror(errno.EACCES) in refusal(path).message


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('[job]\nname "digits"\n', 2, 5),
        ('[job]\nname = "digits"\nname = "again"\n', 3, 14),
        ("[job]\nstop = {epochs = 3\n", 2, 18),
        ("[job\n", 1, 4),
        ('[job]\nname = """never closed', 2, 22),
    ],
)
def test_a_syntax_error_is_shown_where_it_is(
    folder: Path, text: str, line: int, column: int
) -> None:
    error = refusal(written(folder, text))
    assert (error.problems[0].line, error.problems[0].column) == (line, column)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 10_000,
        "a = " + "[" * 10_000 + "]" * 10_000,
        "a = " + "{a = " * 10_000 + "1" + "}" * 10_000,
        "a = " + "[" * 300 + "]" * 300,
        "a" + ".a" * 10_000 + " = 1",
        "[a" + ".a" * 90 + "]\nb = 1",
        "a = " + "9" * 5000,
        "a = " + "9" * 4000,
    ],
    ids=["open", "arrays", "tables", "few arrays", "dots", "header", "long int", "less long int"],
)
def test_absurd_nesting_and_numbers_are_refused_without_a_traceback(
    folder: Path, text: str
) -> None:
    assert len(refusal(written(folder, text)).message) < 2000


# ---------------------------------------------------------------- wrong keys and values


def test_a_key_in_no_section_is_unknown(folder: Path) -> None:
    problem = only_problem(folder, "nmae = 1\n" + MINIMAL)
    assert (problem.line, problem.key) == (1, "nmae")


def test_what_must_be_there_is_missed(folder: Path) -> None:
    assert only_problem(folder, "[servers]\ncount = 1\n").key == "job"
    problem = only_problem(folder, '[job]\nname = "digits"\n')
    assert (problem.line, problem.key) == (1, "job.task")
    problem = only_problem(folder, MINIMAL + "[optimizer]\nlr = 0.1\n")
    assert (problem.line, problem.key) == (4, "optimizer.name")


WRONG = [
    '[workers]\ncount = "4"',
    "[workers]\ncount = 4.0",
    "[workers]\ncount = true",
    "[workers]\ncount = [4]",
    "[workers]\ncount = {a = 1}",
    "[workers]\ncount = 5000",
    "[workers]\ncount = 1e400",
    "[workers]\ncount = -nan",
    "[timeouts]\nready_s = 0",
    '[timeouts]\nready_s = "5s"',
    "[timeouts]\nready_s = 12:00:00",
    "[data]\nshuffle = 1",
    "[limits]\npush = 5",
    '[workers]\ndevice = "gpu"',
    "servers = 3",
    "algorithm = 'sync'",
    "[algorithm]\nname = 3",
    "[optimizer]\nname = 'sgd'\nlr = 0",
    "[compression]\nname = 'topk'\ndensity = 2",
    "[compression]\nname = 'topk'\ndensity = '1%'",
]


def test_a_value_that_cannot_be_is_named_with_what_it_must_be(folder: Path, golden: Golden) -> None:
    screens = []
    for lines in WRONG:
        text = f"{MINIMAL}{lines}\n" if lines.startswith("[") else f"{lines}\n{MINIMAL}"
        problem = only_problem(folder, text)
        assert problem.source == lines.split("\n")[-1]
        screens.append(shown_fault(lines, problem))
    golden("jobfile-values", "\n".join(screens))


def test_momentum_in_the_servers_of_dgc_is_refused_with_the_reason(folder: Path) -> None:
    chosen = '[algorithm]\nname = "dgc"\n[optimizer]\nname = "momentum"\n'
    problem = only_problem(folder, MINIMAL + chosen)
    assert problem.key == "optimizer.name"
    assert problem.suggestion.split()[-1] == "sgd"


@pytest.mark.parametrize("kind", ["algorithm", "optimizer", "compression"])
def test_an_unknown_name_is_answered_with_the_ones_there_are(folder: Path, kind: str) -> None:
    problem = only_problem(folder, MINIMAL + f'[{kind}]\nname = "zzzzzz"\n')
    assert problem.message.startswith("unknown ")
    assert problem.suggestion.startswith("known: ")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ('[algorithm]\nname = "async"', "downpour"),
        ('[algorithm]\nname = "DiLoCo"', "diloco"),
        ('[compression]\nname = "dgc"', "topk-sampled"),
        ('[compression]\nname = "float16"', "fp16"),
        ('[compression]\nname = "none"\nvalues = "fp16"', "float16"),
        ('[optimizer]\nname = "adam"\nlearning_rate = 0.1', "lr"),
        ('[workers]\ndevice = "gpu"', "cuda"),
        ('[workers]\ndevice = "cdua"', "cuda"),
    ],
)
def test_what_is_called_otherwise_elsewhere_is_known(folder: Path, line: str, meant: str) -> None:
    assert named(only_problem(folder, MINIMAL + line + "\n")) == [meant]


@pytest.mark.parametrize(
    ("line", "message", "suggestion"),
    [
        (
            '[compression]\nname = "none"\ndensity = 0.01',
            "none has no density",
            "topk, topk-sampled, gaussian, gaussian-ref, randomk have it",
        ),
        (
            '[algorithm]\nname = "sync"\niterations = 4',
            "sync has no iterations",
            "sandblaster has it",
        ),
        (
            '[compression]\nname = "topk"\ndensty = 0.01',
            "unknown key",
            'did you mean "density"?',
        ),
    ],
)
def test_a_key_that_another_one_has_is_answered_with_its_owners(
    folder: Path, line: str, message: str, suggestion: str
) -> None:
    problem = only_problem(folder, MINIMAL + line + "\n")
    assert (problem.message, problem.suggestion) == (message, suggestion)


def test_the_directory_of_the_servers_states_is_a_full_path(folder: Path) -> None:
    problem = only_problem(folder, MINIMAL + '[servers]\nstate_dir = "fast"\n')
    assert problem.key == "servers.state_dir"
    assert problem.key == "servers.state_dir"


@pytest.mark.parametrize("rate", ["5", "5MB", "fast", "-1MB/s", "0MB/s", "5MB/m", ""])
def test_a_rate_needs_a_number_and_a_unit(folder: Path, rate: str) -> None:
    problem = only_problem(folder, MINIMAL + f'[limits]\nfetch = "{rate}"\n')
    assert problem.key == "limits.fetch"
    assert "rate" in problem.message or "unit" in problem.message


@pytest.mark.parametrize("size", ["5", "5MB/s", "much", "-1MB", "0MB", "5Mbit", ""])
def test_a_window_needs_a_number_of_bytes_and_a_unit(folder: Path, size: str) -> None:
    problem = only_problem(folder, MINIMAL + f'[limits]\npush_window = "{size}"\n')
    assert problem.key == "limits.push_window"
    assert "size" in problem.message or "unit" in problem.message


@pytest.mark.parametrize("name", ["", "Digits", "-a", ".a", "a b", "a/b", "ä", "a" * 65, "a\\n"])
def test_a_job_name_must_do_as_a_directory_everywhere(folder: Path, name: str) -> None:
    problem = only_problem(folder, f'[job]\nname = "{name}"\ntask = "train.py:task"\n')
    assert problem.key == "job.name"


@pytest.mark.parametrize("name", ["a", "0", "a" * 64, "fashion-mnist_v1.2"])
def test_a_plain_job_name_is_taken(folder: Path, name: str) -> None:
    text = f'[job]\nname = "{name}"\ntask = "train.py:task"\n'
    assert jobfile.load(written(folder, text)).job.name == name


@pytest.mark.parametrize("target", ["accuracy", "> 3", "a => 1", "a >= b", "a >= 1.2.3", "a == 1"])
def test_a_target_is_a_metric_a_sign_and_a_number(folder: Path, target: str) -> None:
    text = MINIMAL + f'stop = {{ target = "{target}" }}\n'
    assert only_problem(folder, text).key == "job.stop.target"


@pytest.mark.parametrize("best", ["val_loss", "min val_loss", "loss mean", " min"])
def test_the_best_is_a_metric_and_the_end_that_is_good(folder: Path, best: str) -> None:
    text = MINIMAL + f'[checkpoints]\nbest = "{best}"\n'
    assert only_problem(folder, text).key == "checkpoints.best"
    for good in ("val/loss max", "val loss min"):
        text = MINIMAL + f'[checkpoints]\nbest = "{good}"\n'
        assert jobfile.load(written(folder, text)).checkpoints.best == good


@pytest.mark.parametrize("target", ["accuracy >= 0.85", "loss<1e-3", "val/err <= -2", "a>+.5"])
def test_a_sound_target_is_taken(folder: Path, target: str) -> None:
    text = MINIMAL + f'stop = {{ target = "{target}" }}\n'
    assert jobfile.load(written(folder, text)).job.stop.target == target


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ('name = "sgd"\nlr = 0.1\nweight_decay = 30', "10"),
        ('name = "adam"\nweight_decay = 2000', "1000"),
        ('name = "momentum"\nlr = 0.15\nweight_decay = 7', "6.66"),
    ],
    ids=["both", "the rate is not in the file", "rounded down"],
)
def test_a_decay_that_does_not_go_with_the_rate_is_shown_with_the_most_that_does(
    folder: Path, keys: str, most: str
) -> None:
    problem = only_problem(folder, f"{MINIMAL}[optimizer]\n{keys}\n")
    assert problem.key == "optimizer.weight_decay"
    assert problem.source.startswith("weight_decay = ")
    assert problem.suggestion.split()[0] == most


def test_what_would_make_weights_infinite_is_out_of_range(folder: Path) -> None:
    for name, line in (("adam", "eps = 9e-13"), ("sgd", "lr = 1000001.0")):
        text = f'{MINIMAL}[optimizer]\nname = "{name}"\n{line}\n'
        assert only_problem(folder, text).source == line
    assert "<= 1e+12" in only_problem(folder, f"{MINIMAL}[servers]\npush_norm_max = 1e13\n").message
    text = f'{MINIMAL}[optimizer]\nname = "adam"\neps = 1e-12\nlr = 0.1\nweight_decay = 10\n'
    assert jobfile.load(written(folder, text)).optimizer.options["eps"] == 1e-12


def test_a_target_that_nobody_looks_at_is_refused(folder: Path) -> None:
    text = MINIMAL + 'stop = { target = "loss < 1" }\n'
    assert (
        "job.stop.target" in only_problem(folder, text + "[evaluation]\nevery_epochs = 0\n").message
    )
    problem = only_problem(folder, text + '[algorithm]\nname = "sandblaster"\n')
    assert (problem.key, problem.suggestion) == ("job.stop.target", "remove it")


@pytest.mark.parametrize(
    ("more", "key", "instead"),
    [
        ("[[hosts]]\nbatch_size = 4", "workers.batch_size", "write a number"),
        ('[schedule]\nwarmup = "5 steps"', "schedule.warmup", "10_000 samples"),
        ('[schedule]\nkind = "cosine"\nover = "5 steps"', "schedule.over", "10_000 samples"),
    ],
)
def test_steps_and_hosts_do_not_go_with_a_batch_size_that_is_to_be_found(
    folder: Path, more: str, key: str, instead: str
) -> None:
    text = MINIMAL + '[workers]\nbatch_size = "auto"\n'
    problem = only_problem(folder, text + more + "\n")
    assert problem.key == key
    assert instead in problem.suggestion
    assert jobfile.load(written(folder, text)).workers.batch_size == "auto"
    steps = text.replace("[workers]", "stop = { steps = 9 }\n[workers]")
    problem = only_problem(folder, steps + '[schedule]\nkind = "cosine"\n')
    assert 'over = "50_000 samples"' in problem.suggestion


def test_a_method_that_compares_sums_over_the_dataset_does_without_no_sample(folder):
    text = MINIMAL + '[data]\nbad_samples_max = 3\n[algorithm]\nname = "sandblaster"\n'
    assert only_problem(folder, text).key == "data.bad_samples_max"


@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_what_is_to_be_right_on_average_is_not_rounded_to_16_bits(
    folder: Path, values: str
) -> None:
    random = '[compression]\nname = "randomk"\nunbiased = true\n'
    problem = only_problem(folder, f'{MINIMAL}{random}values = "{values}"\n')
    assert problem.key == "compression.values"
    jobfile.load(written(folder, f'{MINIMAL}{random}values = "float32"\n'))
    waits = random.replace("true", "false")
    jobfile.load(written(folder, f'{MINIMAL}{waits}values = "{values}"\n'))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("push_every_steps = 4\nfetch_every_steps = 8", "overlap is true"),
        (
            "push_every_steps = 4\nfetch_every_steps = 6\noverlap = false",
            "4 steps between pushes do not divide 6 between fetches",
        ),
        ("push_every_steps = 4\nfetch_every_steps = 8\noverlap = false", ""),
        ('push_every_steps = "auto"\nfetch_every_steps = 8\noverlap = false', ""),
    ],
    ids=["overlap", "no-divisor", "kept", "auto"],
)
def test_a_push_before_a_fetch_that_leaves_steps_out_is_doubted(
    folder: Path, keys: str, why: str
) -> None:
    text = f'{MINIMAL}[algorithm]\nname = "downpour"\n{keys}\n'
    assert jobfile.warnings(jobfile.load(written(folder, text))) == []
    warnings = jobfile.warnings(jobfile.load(written(folder, f"{text}push_before_fetch = true\n")))
    assert len(warnings) == bool(why)
    assert all(why in warning for warning in warnings)


@pytest.mark.parametrize(
    ("method", "hosts", "is_refused"),
    [
        ("toy-group", ["", "b"], True),
        ("allreduce", ["", "b"], True),
        ("toy-group", ["a", "b", "c"], True),
        ("toy-group", ["b"], False),
        ("toy-group", [], False),
        ("toy-ring", ["", "b"], False),
    ],
)
def test_a_group_over_several_hosts_wants_a_private_network(
    folder: Path, method: str, hosts: list[str], is_refused: bool
) -> None:
    text = f'{MINIMAL}[algorithm]\nname = "{method}"\n[servers]\ncount = 0\n[workers]\ncount = 2\n'
    for ssh in hosts:
        text += f'[[hosts]]\nssh = "{ssh}"\n' if ssh else "[[hosts]]\n"
    jobfile.load(written(folder, f"{text}[network]\nprivate = true\n"))
    if is_refused:
        problem = only_problem(folder, text)
        assert (problem.line, problem.key) == (5, "algorithm.name")
    else:
        jobfile.load(written(folder, text))


@pytest.mark.parametrize("task", ["train.py", "train:task", ":task", "train.py:", "train.py:a b"])
def test_a_task_is_a_file_and_a_name_in_it(folder: Path, task: str) -> None:
    problem = only_problem(folder, f'[job]\nname = "a"\ntask = "{task}"\n')
    assert problem.key == "job.task"


def test_a_task_in_a_file_that_is_not_there_is_refused(folder: Path) -> None:
    problem = only_problem(folder, '[job]\nname = "a"\ntask = "src/model.py:task"\n')
    assert (problem.key, "src/model.py" in problem.message) == ("job.task", True)


def test_a_port_needs_tcp_and_room_for_the_servers_after_it(folder: Path) -> None:
    tcp = '[network]\ntransport = "tcp"\n'
    problem = only_problem(folder, MINIMAL + "[network]\nport = 7000\n")
    assert (problem.key, named(problem)) == ("network.port", ["tcp"])
    problem = only_problem(folder, MINIMAL + tcp + "port = 65530\n[servers]\ncount = 6\n")
    assert (problem.key, re.findall(r"\d+", problem.message)) == (
        "network.port",
        ["6", "65536", "65535"],
    )
    assert jobfile.load(written(folder, MINIMAL + tcp + "port = 65530\n")).network.port == 65530


# ---------------------------------------------------------------- lines of keys

GNARLY = (
    r'''
# [not.a.table] = 1
top = 1   # key = "comment"
"quoted key" = { a = 1, "b c" = [ { x = 1 }, { x = 2, y = "}],#" } ], d.e = 3 }
text = """
[fake]
fake = 1 \""" still text """""
lit = '''
    + """'''
fake2 = 2'''
[table]
'lit.eral' = 1
dotted . key."with dot.s" = [
  1, # ] not the end
  "a]",
  [2, 3],
]
time = 1979-05-27 07:32:00
[table.sub]
x = 0.5e-3
[[many]]
x = 1
[many.inner]
y = 2
[[many]]
x = 3
[many.inner]
y = 4
"""
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[tuple[Any, ...], Any] = {}
    for key, item in items:
        inner = leaves(item, (*path, key)) if isinstance(item, dict | list) else None
        found |= inner if inner is not None else {(*path, key): item}
    return found


def test_every_key_of_a_gnarly_file_is_found_on_its_line() -> None:
    lines = GNARLY.split("\n")
    found = find_keys(GNARLY)
    expected = leaves(tomllib.loads(GNARLY))
    assert set(expected) <= set(found)
    assert not any("fake" in str(path) for path in found)
    for path in expected:
        key, value = found[path]
        assert value is not None
        if isinstance(path[-1], str):
            assert path[-1] in lines[key.line - 1][key.start : key.end]
    second = found["many", 1, "inner", "y"].value
    assert second is not None
    assert lines[second.line - 1][second.start : second.end] == "4"


SOUND = MINIMAL + (
    'stop = { epochs = 3, target = "a >= 1" }\n[algorithm]\nname = "downpour"\n'
    'overlap = false\n[optimizer]\nname = "adam"\nbeta1 = 0.5\n[limits]\npush = "5MB/s"\n'
)
PIECES = [
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    "=",
    ".",
    ",",
    "\n",
    "#",
    "[[job]]",
    "nan",
    "é",
    "\0",
    "1e999",
]


@times(3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, len(SOUND)), st.integers(0, 12), st.sampled_from(["", *PIECES])),
        min_size=1,
        max_size=4,
    )
)
def test_a_mutilated_job_file_is_read_or_refused_but_never_a_crash(
    folder: Path, cuts: list[tuple[int, int, str]]
) -> None:
    text = SOUND
    for start, length, piece in cuts:
        text = text[:start] + piece + text[start + length :]
    with contextlib.suppress(JobFileError):
        assert jobfile.load(written(folder, text)).job.name


# ---------------------------------------------------------------- how replicas step


WRONG_STEPS = [
    ('[inner]\nname = "adamww"', "inner.name"),
    ('[inner]\nname = "adamw"\nbeta1 = 0.9', "inner.beta1"),
    ('[inner]\nname = "adamw"\nbetas = [0.9]', "inner.betas"),
    ('[inner]\nname = "sgd"\nlr = -1.0', "inner.lr"),
    ('[inner]\nname = "my.optim:Lion"', "inner.name"),
    ('[algorithm]\nname = "sync"\n[inner]\nname = "adamw"', "inner.name"),
    ('[algorithm]\nname = "downpour"\nlocal_lr = 0.1', "algorithm.local_lr"),
    ("[gradient]\nclip_norm = -1.0", "gradient.clip_norm"),
    ('[gradient]\nclip = "global"\n[servers]\ncount = 2', "gradient.clip"),
    ('[algorithm]\nname = "diloco"\n[gradient]\nclip = "global"', "gradient.clip"),
    ("[[parameters]]\nmatch = []", "parameters.0.match"),
    ("[[parameters]]\nweight_decay = 0", "parameters.0.match"),
    ('[[parameters]]\nmatch = ["*"]\ntrain = false\nlr_scale = 2', "parameters.0.train"),
    (
        '[[parameters]]\nmatch = ["a"]\n[[parameters]]\nmatch = ["*"]\nweight_decay = 200',
        "parameters.1.weight_decay",
    ),
    (
        '[[parameters]]\nmatch = ["*"]\nlr_scale = 100\n[optimizer]\nname = "adamw"\n'
        "weight_decay = 100",
        "parameters.0.lr_scale",
    ),
    (
        '[optimizer]\nname = "sgd"\nlr = 10\n[[parameters]]\nmatch = ["*"]\nlr_scale = 1e6',
        "parameters.0.lr_scale",
    ),
    (
        '[optimizer]\nname = "adagrad"\n[[parameters]]\nmatch = ["*"]\nweight_decay = 0.1',
        "parameters.0.weight_decay",
    ),
    (
        '[algorithm]\nname = "sandblaster"\n[[parameters]]\nmatch = ["*"]\nlr_scale = 2',
        "parameters.0.lr_scale",
    ),
    (
        'stop = { steps = 100 }\n[algorithm]\nname = "fedbuff"\nlocal_steps = 10\n'
        "buffer_pushes = 50",
        "algorithm.buffer_pushes",
    ),
    ('[algorithm]\nname = "sparseloco"\n[optimizer]\nname = "momentum"', "optimizer.name"),
    ('[schedule]\nkind = "step"', "schedule.kind"),
    ('[schedule]\nkind = "cosine"\nover = "0 steps"', "schedule.over"),
    ('[algorithm]\nname = "sandblaster"\n[schedule]\nkind = "cosine"', "schedule.kind"),
    ('[algorithm]\nname = "diloco"\n[inner]\nname = "none"', "inner.name"),
    ('[inner]\nname = "rprop"\n[schedule]\nwarmup = "0.5%"', "inner.name"),
    ('[algorithm]\nname = "sandblaster"\n[average]\nema = 0.9', "average.ema"),
    (
        '[average]\nema = 0.9\n[optimizer]\nname = "adam"\n[compression]\nname = "topk"',
        "average.ema",
    ),
    ('[algorithm]\nname = "streaming-diloco"\n[average]\nema = 0.9', "average.ema"),
    ('[algorithm]\nname = "sandblaster"\nreduction = "gram"\nhistory = 31', "algorithm.history"),
    (
        '[algorithm]\nname = "sandblaster"\nline_search = "strong-wolfe"\nc1 = 0.5\nc2 = 0.4',
        "algorithm.c2",
    ),
    ('[algorithm]\nname = "easgd-atomic"\n[average]\nema = 0.9', "average.ema"),
    ('[algorithm]\nname = "dc-asgd"\n[servers]\nfetch_values = "float16"', "servers.fetch_values"),
    ('[schedule]\nlr_scaling = "linear"', "schedule.lr_scaling"),
    ("[average]\nevaluate = true", "average.evaluate"),
    ("[average]\nema = 1.0", "average.ema"),
    ('[schedule]\nkind = "cosinus"', "schedule.kind"),
]


def test_what_is_wrong_with_how_replicas_step_is_said_with_what_to_write(
    folder: Path, golden: Golden
) -> None:
    screens = []
    for text, key in WRONG_STEPS:
        problem = only_problem(folder, f"{MINIMAL}{text}\n")
        assert problem.key == key, text
        screens.append(shown_fault(text, problem))
    golden("jobfile-steps", "\n".join(screens))


def test_an_optimiser_of_somebody_else_s_has_any_options(folder: Path) -> None:
    text = f'{MINIMAL}[inner]\nname = "my.optim:Lion"\nlr = 1e-4\nbetas = [0.9, 0.99]\n'
    job = jobfile.load(written(folder, text))
    assert job.inner == Choice(name="my.optim:Lion", options={"lr": 1e-4, "betas": [0.9, 0.99]})


@pytest.mark.parametrize(
    ("method", "inner"), [("sync", "none"), ("downpour", "sgd"), ("diloco", "adamw")]
)
def test_without_a_section_replicas_step_as_their_method_has_it(
    folder: Path, method: str, inner: str
) -> None:
    job = jobfile.load(written(folder, f'{MINIMAL}[algorithm]\nname = "{method}"\n'))
    assert job.inner.name == inner


def test_groups_are_of_the_optimisers_that_take_gradient_steps(folder: Path) -> None:
    """Not of the one along whole rounds, and what is frozen has no rate that could be wrong."""
    text = (
        '[algorithm]\nname = "diloco"\n[[parameters]]\nmatch = ["*.bias"]\nweight_decay = 500\n'
        '[[parameters]]\nmatch = ["backbone.*", "*norm*"]\ntrain = false\n'
    )
    first, second = jobfile.load(written(folder, MINIMAL + text)).parameters
    assert (first.match, first.weight_decay, first.lr_scale) == (("*.bias",), 500, 1.0)
    assert (second.match, second.train) == (("backbone.*", "*norm*"), False)


def test_weights_to_begin_with_have_to_be_there(folder: Path) -> None:
    (folder / "start.safetensors").touch()
    (folder / "shards").mkdir()
    (folder / "notes.txt").touch()
    job = jobfile.load(written(folder, f'{MINIMAL}weights = "start.safetensors"\n')).job
    assert (job.weights, job.strict) == (str(folder.resolve() / "start.safetensors"), True)
    for value, text in {
        "strat.safetensors": 'did you mean "start.safetensors"?',
        "shards": "there is no .safetensors file in",
        "notes.txt": "must be a .safetensors file",
        "nowhere/x": "it is relative to the job file",
    }.items():
        problem = only_problem(folder, f'{MINIMAL}weights = "{value}"\n')
        assert problem.key == "job.weights"
        assert text in f"{problem.message}; {problem.suggestion}"
    (folder / "shards" / "0.safetensors").touch()
    assert jobfile.load(written(folder, f'{MINIMAL}weights = "shards"\n')).job.weights
