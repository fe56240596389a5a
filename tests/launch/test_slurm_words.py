"""What goes to Slurm and what comes back: the batch script, and the words of its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlctl.errors import DlctlError, Unreachable
from dlctl.launch import orderfiles, slurmcalls, slurmscript, slurmwords
from dlctl.launch.commands import LATE, CommandOutput
from dlctl.launch.slurmrequest import SlurmRequest
from dlctl.launch.slurmwords import JobFacts

PLACE = Path("/home/ann/.local/state/dlctl/slurm/digits-97fc-a1b2c3")
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=dlctl-digits-97fc-a1b2c3
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --partition=dl
#SBATCH --time=91
#SBATCH --account=physics
#SBATCH --constraint="gpu&ib"
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
#SBATCH --mem=16G
#SBATCH --signal=B:USR1@120
#SBATCH --output=/home/ann/.local/state/dlctl/slurm/digits-97fc-a1b2c3/job.log
#SBATCH --open-mode=append
#SBATCH --chdir=/
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --exclusive

cd /
places=/home/ann/.local/state/dlctl/slurm/digits-97fc-a1b2c3
trap 'echo "${SLURM_RESTART_COUNT:-0}" > "$places/.notice" \
&& mv -f "$places/.notice" "$places/notice"' USR1
srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpus-per-task=8 \
--cpu-bind=none /opt/dl/bin/python -P -m daemons.node.keep dlctl.launch.slurmnode:SlurmNode \
/home/ann/.local/state/dlctl/slurm/digits-97fc-a1b2c3 --requeue &
step=$!
# The signal interrupts `wait`, not the step: wait again for the exit status of the step.
while wait "$step"; [ $? -gt 128 ] && kill -0 "$step" 2>/dev/null; do :; done
wait "$step"
exit $?
"""
SHOWN = (
    "JobId=17 JobName=dlctl-digits-97fc-a1b2c3 UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A "
    "Priority=42 Nice=0 Account=(null) QOS=(null) JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code} "
    "RunTime={ran} TimeLimit={limit} TimeMin=N/A SubmitTime=2026-11-21T14:55:20 "
    "NodeList={nodes} BatchHost=h1 NumNodes=3 ReqB:S:C:T=0:0:*:* TRES=cpu=3,node=3 "
    "Comment=JobState=RUNNING me WorkDir=/ Power= \n"
)


def shown(
    state: str = "RUNNING", reason: str = "None", restarts: int = 0, code: str = "0:0",
    ran: str = "00:00:00", limit: str = "UNLIMITED", nodes: str = "(null)",
) -> CommandOutput:  # fmt: skip
    text = SHOWN.format(
        state=state, reason=reason, restarts=restarts, code=code, ran=ran, limit=limit, nodes=nodes
    )
    return CommandOutput(0, text, "")


# ---------------------------------------------------------------- the script


def test_the_script_asks_for_what_the_job_file_says_and_holds_no_secret() -> None:
    asked = SlurmRequest(
        nodes=3, partition="dl", time="90.5m", account="physics", constraint="gpu&ib",
        cpus_per_node=8, gpus_per_node=2, memory="16G", extra=("--exclusive",), requeue=True,
        python="/opt/dl/bin/python",
    )  # fmt: skip
    assert slurmscript.render(asked, "dlctl-digits-97fc-a1b2c3", PLACE) == SCRIPT


def test_what_is_not_asked_for_is_left_to_slurm() -> None:
    options = [
        line.split()[1]
        for line in slurmscript.render(SlurmRequest(nodes=1, notice_s=0), "x", PLACE).splitlines()
        if line.startswith("#SBATCH")
    ]
    assert [option.partition("=")[0] for option in options] == [
        "--job-name", "--nodes", "--ntasks-per-node", "--output", "--open-mode", "--chdir",
        "--no-kill", "--no-requeue",
    ]  # fmt: skip


def read_by_sbatch(line: str) -> list[str]:
    """The options of a line behind #SBATCH, as `sbatch` takes it apart."""
    found, text, quote, escaped = [], "", "", False
    for character in f"{line} ":
        if escaped or (quote and character not in (quote, "\\")):
            text, escaped = text + character, False
        elif character == "\\":
            escaped = True
        elif character in ("'", '"'):
            quote = "" if quote else character
        elif character == "#":
            break
        elif character.isspace():
            found += [text] if text else []
            text = ""
        else:
            text += character
    assert not quote, "it refuses that"
    return found


@pytest.mark.parametrize(
    "value",
    [
        "a b",
        "for ann # and bob",
        "it's",
        'a "b"',
        "back\\slash",
        "\\",
        'it\'s \\ a "b" #',
        "50%",
        "ö",
        "",
    ],
)
def test_whatever_an_option_of_sbatch_holds_sbatch_reads_it_so(value: str) -> None:
    asked = SlurmRequest(nodes=1, extra=("--exclusive", f"--comment={value}", "--mail-type=END"))
    script = slurmscript.render(asked, "x", Path("/it's\\here"))
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    options = [option for line in lines for option in read_by_sbatch(line.removeprefix("#SBATCH"))]
    assert len(options) == len(lines)
    assert options[-3:] == list(asked.extra)
    assert f"--output=/it's\\here/{slurmscript.LOG}" in options


@pytest.mark.parametrize("name", ["a b", "it's", 'a"b', "100%", "$(id)", "a;b", "ö", "-n"])
def test_whatever_the_directory_is_called_the_shell_runs_one_command_with_it(
    tmp_path: Path, name: str
) -> None:
    directory, tools = tmp_path / name, tmp_path / "bin"
    directory.mkdir()
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    (tools / "srun").chmod(0o755)
    script = slurmscript.render(SlurmRequest(nodes=1), "x", directory)
    ended = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True,
        env={"PATH": f"{tools}:{os.environ['PATH']}"},
    )  # fmt: skip
    words = ended.stdout.splitlines()
    assert words[-6:-2] == [sys.executable, "-P", "-m", "daemons.node.keep"]
    assert words[-2:] == [slurmscript.NODE, str(directory)]
    assert ended.returncode == 0
    output = next(line for line in script.splitlines() if line.startswith("#SBATCH --output="))
    read = read_by_sbatch(output.removeprefix("#SBATCH"))
    assert read == [f"--output={directory / 'job.log'}".replace("%", "%%")]


def test_the_script_writes_a_notice_at_the_signal_and_waits_on(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(
        '#!/bin/sh\nkill -USR1 "$PPID"\nwhile [ ! -e "$0.go" ]; do sleep 0.01; done\nexit 3\n'
    )
    (tools / "srun").chmod(0o755)
    script = slurmscript.render(SlurmRequest(nodes=1), "x", tmp_path)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": "2"}
    with subprocess.Popen(["bash"], stdin=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None
        process.stdin.write(script)
        process.stdin.close()
        while not (tmp_path / "notice").exists():
            assert process.poll() is None
        assert (tmp_path / "notice").read_text() == "2\n"
        (tools / "srun.go").touch()
        assert process.wait() == 3


@pytest.mark.parametrize(("text", "minutes"), [("", 0), ("1s", 1), ("90m", 90), ("2h", 120)])
def test_slurm_counts_whole_minutes(text: str, minutes: int) -> None:
    assert slurmscript.minutes(text) == minutes


# ---------------------------------------------------------------- what Slurm says


def test_a_job_that_waits_is_told_with_slurm_s_reason() -> None:
    facts = slurmwords.read(shown("PENDING", "Resources"))
    assert facts is not None
    assert facts.waits
    assert slurmwords.waiting("17", facts).endswith(": Resources")
    again = slurmwords.read(shown("PENDING", "BeginTime", restarts=1))
    assert again is not None
    assert slurmwords.waiting("17", again).endswith("again: BeginTime")


def test_a_reason_may_have_spaces_and_a_comment_may_look_like_a_key() -> None:
    facts = slurmwords.read(shown("PENDING", "Nodes required for job are DOWN (h[2-3])"))
    assert facts is not None
    assert facts.state == "PENDING"
    assert facts.reason == "Nodes required for job are DOWN (h[2-3])"


def test_a_job_that_runs_says_where_and_how_long_it_may() -> None:
    facts = slurmwords.read(shown(ran="1-02:00:30", limit="1-03:00:00", nodes="h[1-3]"))
    assert facts == JobFacts("RUNNING", "", 0, "h[1-3]", "1-03:00:00", 3570.0, "0:0")
    assert facts.is_at_work
    unlimited = slurmwords.read(shown())
    assert unlimited is not None
    assert unlimited.left_s is None


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("CANCELLED by 1000", "the Slurm job 17 was cancelled, and not by dlctl (CANCELLED)"),
        ("TIMEOUT", "the Slurm job 17 has reached its time limit of 00:10:00 (TIMEOUT)"),
        ("FAILED", "the Slurm job 17 has failed (exit 1) (FAILED): srun: error: no such file"),
        ("PREEMPTED", "the Slurm job 17 was preempted by another job (PREEMPTED)"),
        ("NEW_STATE", "the Slurm job 17 has failed (exit 1) (NEW_STATE): srun: error: no such "
                      "file"),
    ],
)  # fmt: skip
def test_every_end_of_a_job_is_told_with_slurm_s_word(state: str, words: str) -> None:
    facts = slurmwords.read(shown(state, limit="00:10:00", code="1:0"))
    assert facts is not None
    assert facts.is_over
    assert slurmwords.ending("17", facts, "srun: error: no such file") == words


def test_a_job_that_slurm_has_forgotten_is_over_and_a_silent_controller_says_nothing() -> None:
    gone = slurmwords.read(
        CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified\n")
    )
    assert gone == JobFacts(slurmwords.GONE)
    assert gone.is_over
    assert (
        slurmwords.read(
            CommandOutput(1, "", "Unable to contact slurm controller (connect failure)")
        )
        is None
    )
    assert slurmwords.read(CommandOutput(LATE, "", "")) is None


@given(st.text(max_size=200))
def test_no_answer_of_a_command_breaks_the_reader(text: str) -> None:
    slurmwords.read(CommandOutput(0, text, ""))
    slurmwords.read(CommandOutput(0, f"JobState={text}", ""))
    slurmwords.seconds(text)


@pytest.mark.parametrize(
    ("out", "number"), [("17\n", "17"), ("17;lab\n", "17"), ("Welcome!\n17\n", "17"), ("", ""),
                        ("no\n", ""), ("-1\n", ""), ("１７\n", "")],
)  # fmt: skip
def test_the_number_of_a_job_is_the_last_word_of_sbatch(out: str, number: str) -> None:
    assert slurmwords.job_id(CommandOutput(0, out, "")) == number
    assert slurmwords.job_id(CommandOutput(1, out, "")) == ""


def test_hints_of_a_node_name_the_keys_of_our_section() -> None:
    error = DlctlError("no room", hint="set dir of this host in [[hosts]] to a place with room")
    assert (
        slurmwords.in_our_terms(error).hint == "set scratch of launcher slurm to a place with room"
    )
    error = DlctlError(
        "old", hint="install dlctl 1.0 there, or set python of this host in [[hosts]]"
    )
    assert (
        slurmwords.in_our_terms(error).hint
        == "install dlctl 1.0 there, or set python of launcher slurm"
    )


def test_a_refusal_is_told_in_sbatch_s_words_and_an_absent_controller_as_unreachable() -> None:
    error = slurmwords.refused(CommandOutput(1, "", "sbatch: error: Invalid account\n"))
    assert type(error) is DlctlError
    assert error.message.endswith(": Invalid account")
    silent = CommandOutput(1, "", "sbatch: error: Unable to contact slurm controller\n")
    assert type(slurmwords.refused(silent)) is Unreachable


def test_a_job_whose_log_cannot_be_written_points_at_the_directory_that_is_not_shared() -> None:
    facts = slurmwords.read(shown("FAILED", "NonZeroExitCode", code="0:53"))
    assert facts is not None
    assert "dir of" in slurmwords.ending("17", facts, "")


# ---------------------------------------------------------------- orders and answers


def test_orders_are_for_nobody_else_and_those_of_somebody_else_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "dlctl" / "slurm" / "run-1"
    orderfiles.make(directory, "")
    path = orderfiles.order(directory, "agent-1")
    orderfiles.write(path, {"secret": "s"})
    assert path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert orderfiles.read(path) == {"secret": "s"}
    assert [found.name for found in directory.iterdir()] == ["agent-1.order"]
    link = orderfiles.order(directory, "agent-2")
    link.symlink_to(path)
    assert orderfiles.read(link) == {}, "a link may lead anywhere"
    path.write_text("[1]")
    assert orderfiles.read(path) == {}
    assert orderfiles.read(directory) == {}, "it is no file"
    orderfiles.write(path, {"secret": "s"})
    with monkeypatch.context() as patch:
        patch.setattr(orderfiles.os, "getuid", lambda: path.stat().st_uid + 1)
        assert orderfiles.read(path) == {}, "it is of somebody else"
    assert orderfiles.read(path) == {"secret": "s"}
    directory.chmod(0o750)
    with pytest.raises(DlctlError, match="mode 0700"):
        orderfiles.check(directory)


def test_a_run_remembers_its_job_and_each_job_has_a_name_of_its_own(tmp_path: Path) -> None:
    assert slurmcalls.read_handle(tmp_path) is None
    first, second = (slurmcalls.new_handle("digits-97fc", tmp_path) for _ in range(2))
    assert first.name != second.name
    first._replace(job_id="17").write(tmp_path)
    assert slurmcalls.read_handle(tmp_path) == first._replace(job_id="17")


def test_only_errors_are_quoted_from_what_the_job_has_printed(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    assert orderfiles.last_error(log) == ""
    log.write_text("srun: nothing to worry about\n")
    assert orderfiles.last_error(log) == ""
    log.write_text("slurmstepd: error: execve(): /x/python: No such file\nmore\n")
    assert orderfiles.last_error(log) == "slurmstepd: error: execve(): /x/python: No such file"
