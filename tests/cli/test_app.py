"""`dlctl` itself: help, completion, global options, and how every command line ends."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest
from golden import Golden

from dlctl import __version__
from dlctl.cli import app
from dlctl.cli.group import summary_and_body
from dlctl.cli.ui import console
from dlctl.errors import (
    DlctlError,
    JobFailed,
    NotFound,
    NotRunning,
    Partial,
    TimedOut,
    Unreachable,
    UsageError,
    VersionMismatch,
)

HEAVY = {"torch", "numpy", "zmq", "pydantic", "rich", "matplotlib"}
PROGRAM = [sys.executable, "-c", "from dlctl.cli.app import main; main()"]


@pytest.fixture(autouse=True)
def fresh_console(own_place: Path):
    yield
    console.setup()


def modules_imported_by(*arguments: str, **environment: str) -> set[str]:
    """What a fresh interpreter has imported after one command line."""
    program = (
        "import sys, json; from dlctl.cli.app import run; run(sys.argv[1:]); "
        "sys.stderr.write('\\n' + json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def completed(line: str) -> list[str]:
    """What TAB offers behind `line`, in bash."""
    words = line.split(" ")
    environment = {
        "_DLCTL_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        PROGRAM, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return [offer.partition(",")[2] for offer in done.stdout.splitlines()]


# ---------------------------------------------------------------- quick where people wait


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"]])
def test_help_and_version_import_nothing_heavy_and_no_command(arguments: list[str]) -> None:
    imported = modules_imported_by(*arguments)
    assert not imported & HEAVY
    assert not imported & {f"dlctl.cli.commands.{name}" for name in app.cli.lines}


def test_tab_imports_nothing_heavy_and_no_command() -> None:
    imported = modules_imported_by(
        _DLCTL_COMPLETE="bash_complete", COMP_WORDS="dlctl st", COMP_CWORD="1"
    )
    assert not imported & HEAVY
    assert not imported & {f"dlctl.cli.commands.{name}" for name in app.cli.lines}


def test_the_help_of_no_command_imports_anything_heavy() -> None:
    program = (
        "import sys; from dlctl.cli.app import cli, run\n"
        "for name in cli.lines:\n"
        "    assert run([name, '--help']) == 0, name\n"
        f"    found = set(sys.modules) & {HEAVY}\n"
        "    assert not found, (name, found)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------- help and completion


def test_help_lists_every_command_under_its_heading(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert app.run(["-h"]) == 0
    text = capsys.readouterr().out
    for heading, lines in app.SECTIONS.items():
        assert f"\n{heading}:\n" in text
        assert all(f"  {name} " in text for name in lines)
    assert max(map(len, text.splitlines())) <= 80
    golden("help", text)


@pytest.mark.parametrize("name", app.cli.lines)
def test_every_command_says_what_it_does_and_shows_examples_first(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = app.cli.get_command(click.Context(app.cli), name)
    assert command is not None
    assert command.name == name
    assert summary_and_body(command)[0] == app.cli.lines[name]
    assert app.run([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"\nExamples:\n  dlctl {name}" in text or f"dlctl {name} " in text.split("Examples:")[1]
    assert text.index("Examples:") < text.index("Options:")


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["help", "start"]) == 0
    asked = capsys.readouterr().out
    assert app.run(["start", "--help"]) == 0
    assert capsys.readouterr().out == asked


def test_without_a_command_the_help_comes_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: dlctl ")


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["-V"]) == 0
    assert capsys.readouterr().out == f"dlctl {__version__}\n"


def test_tab_offers_commands_options_and_values() -> None:
    assert completed("dlctl va") == ["validate"]
    assert "--json" in completed("dlctl validate --")
    assert completed("dlctl --color a") == ["auto", "always"]
    assert completed("dlctl completion ") == ["bash", "zsh", "fish"]


def test_tab_offers_the_runs_of_this_machine(run_directory) -> None:
    run_directory("digits-7f3a")
    run_directory("spirals-11aa")
    assert completed("dlctl status -j di") == ["digits-7f3a"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_dlctl(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert f"_DLCTL_COMPLETE={shell}_complete" in text


def test_bash_accepts_its_completion_script() -> None:
    script = subprocess.run([*PROGRAM, "completion", "bash"], capture_output=True, check=True)
    check = subprocess.run(["bash", "-n"], input=script.stdout, capture_output=True, check=False)
    assert (check.returncode, check.stderr) == (0, b"")


# ---------------------------------------------------------------- usage errors


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["stats"],
            'error: no such command "stats"; did you mean "status"?\n  next: dlctl --help\n',
        ),
        (["validate"], "error: missing argument 'FILE'\n  next: dlctl validate --help\n"),
        (
            ["completion", "tcsh"],
            "error: invalid value for '{bash|zsh|fish}': 'tcsh' is not one of 'bash', 'zsh', "
            "'fish'\n  next: dlctl completion --help\n",
        ),
    ],
)
def test_a_wrong_command_line_is_answered_with_what_was_meant(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", error)


@pytest.mark.parametrize(
    ("arguments", "meant", "command"),
    [
        (["validate", "--jsn", "x"], "--json", "dlctl validate"),
        (["--zzz", "ps"], "--zzz", "dlctl"),
        (["checkpoint", "--zzz"], "--zzz", "dlctl checkpoint"),
    ],
)
def test_a_wrong_option_is_answered_in_clicks_words(
    arguments: list[str], meant: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(arguments) == 2
    text, hint = capsys.readouterr().err.splitlines()
    assert text.startswith("error: no such option")
    assert meant in text
    assert hint == f"  next: {command} --help"


# ---------------------------------------------------------------- global options


@pytest.mark.parametrize("arguments", [["-q", "algorithms"], ["algorithms", "-q"]])
def test_global_options_stand_before_or_behind_the_command(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.split()[0] == "downpour"
    assert captured.err == ""


def test_an_option_behind_the_command_does_not_undo_those_before_it() -> None:
    assert app.run(["-q", "--color", "always", "algorithms", "--color", "never"]) == 0
    assert (console.settings.quiet, console.shows_color()) == (True, False)


def test_the_environment_sets_what_no_flag_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLCTL_COLOR", "always")
    assert app.run(["algorithms"]) == 0
    assert console.shows_color()
    assert app.run(["--color", "never", "algorithms"]) == 0
    assert not console.shows_color()


# ---------------------------------------------------------------- how a command ends


def ending_of(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("dlctl.registry.names", fail)
    return app.run(["algorithms"])


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (DlctlError, 1),
        (UsageError, 2),
        (NotRunning, 3),
        (NotFound, 4),
        (Unreachable, 5),
        (TimedOut, 6),
        (JobFailed, 7),
        (Partial, 8),
        (VersionMismatch, 9),
    ],
)
def test_every_error_ends_in_its_own_exit_code(
    kind: type[DlctlError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ending_of(kind("it went wrong", hint="dlctl ps"), monkeypatch) == code
    assert capsys.readouterr().err == "error: it went wrong\n  next: dlctl ps\n"


def test_ctrl_c_ends_in_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending_of(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_ends_in_70_and_its_traceback_in_a_private_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_place: Path
) -> None:
    assert ending_of(KeyError("surprise\x1b[2J"), monkeypatch) == 70
    error = capsys.readouterr().err
    (report,) = (own_place.parent / "state" / "dlctl" / "crash").iterdir()
    assert str(report) in error
    assert "Traceback" not in error
    assert "\x1b" not in error
    text = report.read_text()
    assert "Traceback" in text
    assert "KeyError: 'surprise" in text
    assert report.stat().st_mode & 0o077 == 0


def test_a_bug_whose_traceback_cannot_be_kept_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    assert ending_of(ZeroDivisionError("oh"), monkeypatch) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    for arguments in (["--help"], ["algorithms"]):
        done = subprocess.run(
            [*PROGRAM, *arguments], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
        assert (done.returncode, done.stderr) == (141, b"")
    os.close(write_end)


def test_a_full_disk_is_told_and_is_no_bug() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*PROGRAM, "algorithms", "-q"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"error: cannot write to stdout: No space left on device\n"


def test_a_terminal_whose_window_is_closed_is_no_bug() -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    done = subprocess.run(
        [*PROGRAM, "algorithms", "-q"], stdout=theirs, stderr=subprocess.PIPE, check=False
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_on_a_real_terminal_errors_are_red_unless_no_color_is_set(
    environment: dict[str, str], coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    keep = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    subprocess.run(
        [*PROGRAM, "stats"],
        env={**keep, "TERM": "xterm", **environment},
        stderr=theirs,
        check=False,
    )
    os.close(theirs)
    shown = os.read(ours, 10_000)
    os.close(ours)
    assert b"no such command" in shown
    assert (b"\x1b[31m" in shown) is coloured


# ---------------------------------------------------------------- validate, algorithms

JOB = '[job]\nname = "digits"\ntask = "train.py:task"\n'


def test_validate_says_what_the_job_is(
    own_place: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    (own_place / "train.py").touch()
    (own_place / "job.toml").write_text(JOB)
    assert app.run(["validate", "job.toml"]) == 0
    golden("validate", capsys.readouterr().out)
    ends = f'{JOB}stop = {{ seconds = 30 }}\n[algorithm]\nname = "sandblaster"\n'
    (own_place / "job.toml").write_text(ends)
    assert app.run(["validate", "job.toml"]) == 0
    golden("validate-without-servers-optimizer", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("method", "stop", "work"),
    [
        ("sync", "samples = 3_840", "until 3840 samples (at least 30 updates)"),
        ("downpour", "steps = 100", "until 100 steps (100 pushes)"),
        ("diloco", "samples = 64_000", "until 64000 samples (1 update)"),
        ("sync", "epochs = 2", "until 2 epochs"),
    ],
)
def test_validate_says_what_a_length_comes_to(
    own_place: Path, capsys: pytest.CaptureFixture[str], method: str, stop: str, work: str
) -> None:
    (own_place / "train.py").touch()
    more = f'stop = {{ {stop} }}\n[algorithm]\nname = "{method}"\n[workers]\ncount = 4\n'
    (own_place / "job.toml").write_text(f"{JOB}{more}batch_size = 32\n")
    assert app.run(["validate", "job.toml"]) == 0
    assert capsys.readouterr().out.endswith(f", {work}\n")


def test_validate_as_json_has_the_whole_job(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "train.py").touch()
    (own_place / "job.toml").write_text(JOB)
    assert app.run(["validate", "--json", "job.toml"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["schema"], read["valid"], read["problems"]) == ("dlctl.validate/1", True, [])
    assert read["job"]["algorithm"]["options"]["fetch_every_steps"] == 1


def test_validate_warns_of_what_is_valid_and_will_not_do_what_it_says(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "train.py").touch()
    method = '[algorithm]\nname = "downpour"\npush_before_fetch = true\n'
    (own_place / "job.toml").write_text(f'[job]\nname = "a"\ntask = "train.py:task"\n{method}')
    assert app.run(["validate", "job.toml"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("job.toml ")
    assert "push_before_fetch" in captured.err
    assert app.run(["validate", "--json", "job.toml"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning in captured.err.replace("\n", " ")


def test_validate_as_json_lists_problems_and_still_exits_with_2(
    own_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_place / "job.toml").write_text(JOB + "[server]\n")
    assert app.run(["validate", "--json", "job.toml"]) == 2
    captured = capsys.readouterr()
    problems = json.loads(captured.out)["problems"]
    assert [(p["line"], p["key"]) for p in problems] == [(3, "job.task"), (4, "server")]
    assert captured.err.startswith("error: ")


def test_algorithms_shows_the_keys_of_one_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["algorithms", "downpour"]) == 0
    text = capsys.readouterr().out
    assert '[algorithm]\nname = "downpour"\nfetch_every_steps = 1\n' in text
    assert app.run(["algorithms", "topk", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert (entry["section"], entry["keys"][0]["name"]) == ("compression", "density")


def test_algorithms_lists_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["algorithms", "optimizers", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert {entry["kind"] for entry in entries} == {"optimizers"}
    assert {"muon", "soap", "shampoo", "lmo", "isotropic"} <= {entry["name"] for entry in entries}
    assert not any("keys" in entry for entry in entries)
    assert app.run(["algorithms", "optimizer"]) == 4
    assert '"optimizers"' in capsys.readouterr().err


def test_algorithms_suggests_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["algorithms", "adagard"]) == 4
    assert '"adagrad"' in capsys.readouterr().err
