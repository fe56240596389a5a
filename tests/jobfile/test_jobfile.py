"""Job files: what is right is read, what is wrong is said, all of it, with its line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from example_counts import times
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
    assert method.message == 'sandblaster does not go with compression.name = "topk"'


def only_problem(folder: Path, text: str) -> jobfile.JobFileProblem:
    """But for the line of a method that it does not go with."""
    problems = refusal(written(folder, text)).problems
    problems = [each for each in problems if " does not go with " not in each.message]
    assert len(problems) == 1, problems
    return problems[0]


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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"fast"', 'must be a whole number or "auto" (got "fast")'),
        ('"Auto"', 'must be a whole number or "auto" (got "Auto"); did you mean "auto"?'),
        ("0", 'must be >= 1 or "auto" (got 0)'),
        ("-1", 'must be >= 1 or "auto" (got -1)'),
        ("1.5", 'must be a whole number or "auto" (got 1.5)'),
        ("true", 'must be a whole number or "auto" (got true)'),
        ("[1]", 'must be a whole number or "auto" (got an array)'),
        ("{ n = 1 }", 'must be a whole number or "auto" (got a table)'),
    ],
)
def test_what_an_interval_cannot_be_is_told_once_with_all_that_it_can_be(
    folder: Path, value: str, message: str
) -> None:
    text = MINIMAL + f'[algorithm]\nname = "downpour"\nfetch_every_steps = {value}\n'
    (problem,) = refusal(written(folder, text)).problems
    assert problem.key == "algorithm.fetch_every_steps"
    assert "; ".join(filter(None, (problem.message, problem.suggestion))) == message


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
    with pytest.raises(JobFileError, match=r"must be >= 1 and <= 4096 \(got 0\)") as caught:
        jobfile.load(path, {"workers.count": 0})
    assert "count = 2" not in caught.value.message


def test_effective_options_fill_in_the_defaults_of_an_entry() -> None:
    found = jobfile.effective_options("compressors", Choice(name="topk", options={"density": 0.5}))
    assert found["density"] == 0.5
    assert set(found) == {
        f.name for f in dataclasses.fields(registry.load("compressors", "topk").Options)
    }


def test_effective_options_refuse_what_the_entry_does_not_have() -> None:
    with pytest.raises(UsageError, match='compressor "topk" are not valid: dense unknown key'):
        jobfile.effective_options("compressors", Choice(name="topk", options={"dense": True}))


# ---------------------------------------------------------------- how it is shown


def test_the_report_shows_every_problem_with_its_line_and_a_suggestion(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    text = MINIMAL + '\n[servers]\ncount = 0\nrate_limit = "100MB/s"\n\n[limit]\npush = "off"\n'
    written(folder, text)
    assert refusal(Path("job.toml")).message == (
        "job file is not valid\n"
        "  --> job.toml:6   servers.count\n"
        "  |\n"
        "6 | count = 0\n"
        "  |         ^ downpour keeps its parameters on servers; use 1 or more\n"
        "  --> job.toml:7   servers.rate_limit\n"
        "  |\n"
        '7 | rate_limit = "100MB/s"\n'
        "  | ^^^^^^^^^^ unknown key; known: count, durability, state_dir, push_norm_max, "
        "fetch_values\n"
        "  --> job.toml:9   limit\n"
        "  |\n"
        "9 | [limit]\n"
        '  |  ^^^^^ unknown section; did you mean "limits"?\n'
        "3 problems. Check again with: dlctl validate job.toml"
    )


@pytest.mark.parametrize(
    ("method", "section", "wrong", "of_method"),
    [
        ("downpour", "[servers]\ncount = 0", "downpour keeps", "needs servers.count of 1"),
        ("toy-ring", "[servers]\ncount = 2", "toy-ring has no", "needs servers.count = 0"),
        ("toy-ring", "[workers]\ncount = 513", "at most 512 can", "has 512 workers at most"),
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
    suggested = {p.key: p.suggestion for p in problems}
    assert suggested["job.name"] == 'did you mean "fashion-mnist"?'
    assert suggested["job.task"] == 'did you mean "train.py:task"?'
    assert suggested["algorithm.name"] == 'did you mean "downpour"?'
    assert suggested["compression.denstiy"] == 'did you mean "density"?'


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
    assert '^^^^^ unknown key; did you mean "epochs"?' in message


# ---------------------------------------------------------------- files that cannot be read


def test_a_missing_file_is_said_to_be_missing_and_a_similar_one_is_named(folder: Path) -> None:
    written(folder, MINIMAL)
    error = refusal(folder / "jop.toml")
    assert error.message.startswith("cannot read the job file\n  --> ")
    assert "does not exist; did you mean" in error.message
    assert "job.toml" in error.problems[0].suggestion


def test_a_directory_is_no_job_file_but_the_one_in_it_is_named(folder: Path) -> None:
    written(folder, MINIMAL)
    assert "is a directory, not a regular file; did you mean" in refusal(folder).message


def test_an_empty_file_is_said_to_be_empty(folder: Path) -> None:
    assert "is empty; dlctl init" in refusal(written(folder, " \n\n")).message


def test_a_file_of_more_than_a_megabyte_is_refused_before_it_is_read(folder: Path) -> None:
    path = folder / "job.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # More than the memory.
    assert f"has {1 << 40} bytes; a job file has at most 1000000" in refusal(path).message


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "job.toml")
    assert "job.toml\n   | is a FIFO, not a regular file" in refusal(folder / "job.toml").message


def test_a_file_that_may_not_be_read_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> int:  # root, as in many containers, may read everything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    path = written(folder, MINIMAL)
    monkeypatch.setattr(regular, "descriptor", refuse)
    assert "Permission denied" in refusal(path).message


def test_a_name_that_no_file_can_have_is_refused() -> None:
    assert "cannot read the job file" in refusal(Path("a\0b")).message


def test_bytes_that_are_not_utf8_are_named_with_their_line(folder: Path) -> None:
    error = refusal(written(folder, b'[job]\nname = "d\xe9j\xe0"\n'))
    assert error.problems[0].line == 2
    assert "is not UTF-8: byte 0xe9" in error.message


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
    assert error.message.startswith("job file is not valid TOML\n")
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
    assert (problem.line, problem.message) == (1, "unknown key")


def test_what_must_be_there_is_missed(folder: Path) -> None:
    assert only_problem(folder, "[servers]\ncount = 1\n").message == "section [job] is missing"
    problem = only_problem(folder, '[job]\nname = "digits"\n')
    assert (problem.line, problem.message) == (1, '"task" is missing')
    problem = only_problem(folder, MINIMAL + "[optimizer]\nlr = 0.1\n")
    assert (problem.line, problem.key, problem.message) == (
        4,
        "optimizer.name",
        '"name" is missing',
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('[workers]\ncount = "4"', 'must be a whole number (got "4")'),
        ("[workers]\ncount = 4.0", "must be a whole number (got 4.0)"),
        ("[workers]\ncount = true", "must be a whole number (got true)"),
        ("[workers]\ncount = [4]", "must be a whole number (got an array)"),
        ("[workers]\ncount = {a = 1}", "must be a whole number (got a table)"),
        ("[workers]\ncount = 5000", "must be >= 1 and <= 4096 (got 5000)"),
        ("[workers]\ncount = 1e400", "must be a finite number (got inf)"),
        ("[workers]\ncount = -nan", "must be a finite number (got nan)"),
        ("[timeouts]\nready_s = 0", "must be > 0 and <= 10000000 (got 0)"),
        ('[timeouts]\nready_s = "5s"', 'must be a number (got "5s")'),
        ("[timeouts]\nready_s = 12:00:00", "must not be a date or time (got 12:00:00)"),
        ("[data]\nshuffle = 1", "must be true or false (got 1)"),
        ("[limits]\npush = 5", "must be text in quotes (got 5)"),
        ('[workers]\ndevice = "gpu"', 'must be "auto", "cpu" or "cuda" (got "gpu")'),
        ("servers = 3", "must be a table (got 3)"),
        ("algorithm = 'sync'", 'must be a table (got "sync")'),
        ("[algorithm]\nname = 3", "must be text in quotes (got 3)"),
        ("[optimizer]\nname = 'sgd'\nlr = 0", "must be > 0 and <= 1000000 (got 0)"),
        ("[compression]\nname = 'topk'\ndensity = 2", "must be > 0 and <= 1 (got 2)"),
        ("[compression]\nname = 'topk'\ndensity = '1%'", 'must be a number (got "1%")'),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_it_must_be(
    folder: Path, line: str, message: str
) -> None:
    text = line + "\n" + MINIMAL if not line.startswith("[") else MINIMAL + line + "\n"
    problem = only_problem(folder, text)
    assert problem.message == message
    assert problem.source in line.split("\n")


def test_momentum_in_the_servers_of_dgc_is_refused_with_the_reason(folder: Path) -> None:
    chosen = '[algorithm]\nname = "dgc"\n[optimizer]\nname = "momentum"\n'
    problem = only_problem(folder, MINIMAL + chosen)
    assert "which would count twice" in problem.message
    assert problem.suggestion == "use sgd"


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
    assert only_problem(folder, MINIMAL + line + "\n").suggestion == f'did you mean "{meant}"?'


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
    assert problem.message == 'must be a full path, or "" for the default'


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
    assert problem.message.startswith("must be 1 to 64 of a-z")


@pytest.mark.parametrize("name", ["a", "0", "a" * 64, "fashion-mnist_v1.2"])
def test_a_plain_job_name_is_taken(folder: Path, name: str) -> None:
    text = f'[job]\nname = "{name}"\ntask = "train.py:task"\n'
    assert jobfile.load(written(folder, text)).job.name == name


@pytest.mark.parametrize("target", ["accuracy", "> 3", "a => 1", "a >= b", "a >= 1.2.3", "a == 1"])
def test_a_target_is_a_metric_a_sign_and_a_number(folder: Path, target: str) -> None:
    text = MINIMAL + f'stop = {{ target = "{target}" }}\n'
    assert "must be a metric" in only_problem(folder, text).message


@pytest.mark.parametrize("best", ["val_loss", "min val_loss", "loss mean", " min"])
def test_the_best_is_a_metric_and_the_end_that_is_good(folder: Path, best: str) -> None:
    text = MINIMAL + f'[checkpoints]\nbest = "{best}"\n'
    assert "must be a metric, and min or max" in only_problem(folder, text).message
    for good in ("val/loss max", "val loss min"):
        text = MINIMAL + f'[checkpoints]\nbest = "{good}"\n'
        assert jobfile.load(written(folder, text)).checkpoints.best == good


@pytest.mark.parametrize("target", ["accuracy >= 0.85", "loss<1e-3", "val/err <= -2", "a>+.5"])
def test_a_sound_target_is_taken(folder: Path, target: str) -> None:
    text = MINIMAL + f'stop = {{ target = "{target}" }}\n'
    assert jobfile.load(written(folder, text)).job.stop.target == target


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('name = "sgd"\nlr = 0.1\nweight_decay = 30', "(got 0.1 * 30); 10 is the most"),
        ('name = "adam"\nweight_decay = 2000', "(got 0.001 * 2000); 1000 is the most"),
        ('name = "momentum"\nlr = 0.15\nweight_decay = 7', "(got 0.15 * 7); 6.66 is the most"),
    ],
    ids=["both", "the rate is not in the file", "rounded down"],
)
def test_a_decay_that_does_not_go_with_the_rate_is_shown_with_the_most_that_does(
    folder: Path, keys: str, message: str
) -> None:
    problem = only_problem(folder, f"{MINIMAL}[optimizer]\n{keys}\n")
    assert problem.key == "optimizer.weight_decay"
    assert problem.source.startswith("weight_decay = ")
    assert f"{problem.message}; {problem.suggestion}" == (
        f"lr * weight_decay must be <= 1, or weights grow without bound {message} with this lr"
    )


def test_what_would_make_weights_infinite_is_out_of_range(folder: Path) -> None:
    for keys in ('name = "adam"\neps = 9e-13', 'name = "sgd"\nlr = 1000001.0'):
        assert "must be >" in only_problem(folder, f"{MINIMAL}[optimizer]\n{keys}\n").message
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
    assert problem.suggestion == 'add over = "50_000 samples"'


def test_a_method_that_compares_sums_over_the_dataset_does_without_no_sample(folder):
    text = MINIMAL + '[data]\nbad_samples_max = 3\n[algorithm]\nname = "sandblaster"\n'
    assert only_problem(folder, text).key == "data.bad_samples_max"


@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_what_is_to_be_right_on_average_is_not_rounded_to_16_bits(
    folder: Path, values: str
) -> None:
    random = '[compression]\nname = "randomk"\nunbiased = true\n'
    problem = only_problem(folder, f'{MINIMAL}{random}values = "{values}"\n')
    assert (
        problem.message
        == 'must be "float32" with unbiased = true: 16 bits are not right on average'
    )
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
        assert "neither encrypted nor authenticated" in problem.message
        assert problem.line == 5
    else:
        jobfile.load(written(folder, text))


@pytest.mark.parametrize("task", ["train.py", "train:task", ":task", "train.py:", "train.py:a b"])
def test_a_task_is_a_file_and_a_name_in_it(folder: Path, task: str) -> None:
    problem = only_problem(folder, f'[job]\nname = "a"\ntask = "{task}"\n')
    assert problem.message == 'must be a file and a name in it, as in "train.py:task"'


def test_a_task_in_a_file_that_is_not_there_is_refused(folder: Path) -> None:
    problem = only_problem(folder, '[job]\nname = "a"\ntask = "src/model.py:task"\n')
    assert problem.message == 'there is no file "src/model.py" beside the job file'


def test_a_port_needs_tcp_and_room_for_the_servers_after_it(folder: Path) -> None:
    tcp = '[network]\ntransport = "tcp"\n'
    problem = only_problem(folder, MINIMAL + "[network]\nport = 7000\n")
    assert problem.suggestion == 'add transport = "tcp"'
    problem = only_problem(folder, MINIMAL + tcp + "port = 65530\n[servers]\ncount = 6\n")
    assert (
        problem.message == "6 servers take the ports after it, up to 65536; the last port is 65535"
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


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('[inner]\nname = "adamww"', "inner.name", 'inner optimizer; did you mean "adamw"?'),
        ('[inner]\nname = "adamw"\nbeta1 = 0.9', "inner.beta1", 'did you mean "betas"?'),
        ('[inner]\nname = "adamw"\nbetas = [0.9]', "inner.betas", "too few values"),
        ('[inner]\nname = "sgd"\nlr = -1.0', "inner.lr", "must be >= 0"),
        ('[inner]\nname = "my.optim:Lion"', "inner.name", "needs its lr"),
        ('[algorithm]\nname = "sync"\n[inner]\nname = "adamw"', "inner.name", "remove [inner]"),
        (
            '[algorithm]\nname = "downpour"\nlocal_lr = 0.1', "algorithm.local_lr",
            'write [inner] with name = "sgd" and lr = 0.1',
        ),
        ("[gradient]\nclip_norm = -1.0", "gradient.clip_norm", "must be >= 0"),
        ('[gradient]\nclip = "global"\n[servers]\ncount = 2', "gradient.clip", "use count = 1"),
        (
            '[algorithm]\nname = "diloco"\n[gradient]\nclip = "global"', "gradient.clip",
            "pushes no gradients",
        ),
        ("[[parameters]]\nmatch = []", "parameters.0.match", 'as in ["*.bias"'),
        ("[[parameters]]\nweight_decay = 0", "parameters.0.match", '"match" is missing'),
        (
            '[[parameters]]\nmatch = ["*"]\ntrain = false\nlr_scale = 2', "parameters.0.train",
            "neither a rate nor a decay",
        ),
        (
            '[[parameters]]\nmatch = ["a"]\n[[parameters]]\nmatch = ["*"]\nweight_decay = 200',
            "parameters.1.weight_decay", "(got 0.01 * 200); 100 is the most",
        ),
        (
            '[[parameters]]\nmatch = ["*"]\nlr_scale = 100\n[optimizer]\nname = "adamw"\n'
            "weight_decay = 100", "parameters.0.lr_scale", "(got 0.1 * 100)",
        ),
        (
            '[optimizer]\nname = "sgd"\nlr = 10\n[[parameters]]\nmatch = ["*"]\nlr_scale = 1e6',
            "parameters.0.lr_scale", "lr times it is 1e+07",
        ),
        (
            '[optimizer]\nname = "adagrad"\n[[parameters]]\nmatch = ["*"]\nweight_decay = 0.1',
            "parameters.0.weight_decay", "adagrad has no weight_decay",
        ),
        (
            '[algorithm]\nname = "sandblaster"\n[[parameters]]\nmatch = ["*"]\nlr_scale = 2',
            "parameters.0.lr_scale", "no optimiser that takes gradient steps",
        ),
        (
            'stop = { steps = 100 }\n[algorithm]\nname = "fedbuff"\nlocal_steps = 10\n'
            "buffer_pushes = 50", "algorithm.buffer_pushes", "the run has at most 11 pushes",
        ),
        (
            '[algorithm]\nname = "sparseloco"\n[optimizer]\nname = "momentum"',
            "optimizer.name", "error feedback replaces its momentum; use sgd",
        ),
        ('[schedule]\nkind = "step"', "schedule.kind", "add decay_at"),
        ('[schedule]\nkind = "cosine"\nover = "0 steps"', "schedule.over", "no sample long"),
        (
            '[algorithm]\nname = "sandblaster"\n[schedule]\nkind = "cosine"', "schedule.kind",
            "no optimiser that takes gradient steps",
        ),
        (
            '[algorithm]\nname = "diloco"\n[inner]\nname = "none"', "inner.name",
            'use "adamw", or remove [inner]',
        ),
        (
            '[inner]\nname = "rprop"\n[schedule]\nwarmup = "0.5%"', "inner.name",
            "adapts its rates itself",
        ),
        (
            '[algorithm]\nname = "sandblaster"\n[average]\nema = 0.9', "average.ema",
            "remove [average]",
        ),
        (
            '[average]\nema = 0.9\n[optimizer]\nname = "adam"\n[compression]\nname = "topk"',
            "average.ema", 'use [optimizer] name = "sgd"',
        ),
        (
            '[algorithm]\nname = "streaming-diloco"\n[average]\nema = 0.9', "average.ema",
            "momentum would step along those without a push",
        ),
        (
            '[algorithm]\nname = "sandblaster"\nreduction = "gram"\nhistory = 31',
            "algorithm.history", 'make it smaller, or take "paper"',
        ),
        (
            '[algorithm]\nname = "sandblaster"\nline_search = "strong-wolfe"\nc1 = 0.5\nc2 = 0.4',
            "algorithm.c2", "must be more than c1",
        ),
        (
            '[algorithm]\nname = "easgd-atomic"\n[average]\nema = 0.9', "average.ema",
            "easgd-atomic has no optimiser on its servers",
        ),
        (
            '[algorithm]\nname = "dc-asgd"\n[servers]\nfetch_values = "float16"',
            "servers.fetch_values", 'use "float32"',
        ),
        (
            '[schedule]\nlr_scaling = "linear"', "schedule.lr_scaling",
            "more workers of downpour do not make the batch",
        ),
        ("[average]\nevaluate = true", "average.evaluate", "add ema = 0.999"),
        ("[average]\nema = 1.0", "average.ema", "and < 1"),
        ('[schedule]\nkind = "cosinus"', "schedule.kind", 'did you mean "cosine"?'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_how_replicas_step_is_said_with_what_to_write(
    folder: Path, text: str, key: str, said: str
) -> None:
    problem = only_problem(folder, f"{MINIMAL}{text}\n")
    assert problem.key == key
    assert said in f"{problem.message}; {problem.suggestion}"


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
    for value, said in {
        "strat.safetensors": 'did you mean "start.safetensors"?',
        "shards": "there is no .safetensors file in",
        "notes.txt": "must be a .safetensors file",
        "nowhere/x": "it is relative to the job file",
    }.items():
        problem = only_problem(folder, f'{MINIMAL}weights = "{value}"\n')
        assert problem.key == "job.weights"
        assert said in f"{problem.message}; {problem.suggestion}"
    (folder / "shards" / "0.safetensors").touch()
    assert jobfile.load(written(folder, f'{MINIMAL}weights = "shards"\n')).job.weights
