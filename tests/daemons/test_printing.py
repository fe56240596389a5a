"""What user code prints reaches the log whole, from every thread, and the log's file stays small.

Each story runs in a process of its own, because descriptors 1 and 2 are those of the log there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

START = """
    import logging, os, sys, threading
    from pathlib import Path
    from daemons import logs
    path = Path(sys.argv[1])
    handler = logs.set_up("worker-0", 1, path)
    logs.capture_prints()
    """


def lines_after(path: Path, story: str) -> list[str]:
    """What is in the log of a process that does this."""
    with path.open("ab") as log:
        command = [sys.executable, "-c", dedent(START) + dedent(story), str(path)]
        subprocess.run(command, check=True, stdout=log, stderr=log, timeout=60)
    return [json.loads(line)["msg"] for line in path.read_text().splitlines()]


def test_prints_of_three_threads_at_once_are_all_logged_and_not_mixed_up(tmp_path):
    story = """
        sys.setswitchinterval(1e-6)
        def work(n):
            for i in range(300):
                print(f"{n} {i}")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
    lines = lines_after(tmp_path / "log", story)
    assert Counter(lines) == Counter(f"{n} {i}" for n in range(3) for i in range(300))


def test_the_last_line_is_logged_although_nothing_ends_it(tmp_path):
    story = """
        print("epoch 1", end="", flush=True)
        print(" done")
        print("and then", end="")
        sys.stderr.write("oh")
        logs.end_prints()
        """
    assert lines_after(tmp_path / "log", story) == ["epoch 1 done", "and then", "oh"]


CONFIGURED = {
    "nothing": ("", ["warning careful"]),
    "a level alone": (
        "logging.getLogger().setLevel('INFO')",
        ["info loaded", "warning careful"],
    ),
    "basicConfig": (
        "logging.basicConfig(level=logging.INFO)",
        ["info INFO:mine:loaded", "info WARNING:mine:careful"],
    ),
    "basicConfig with force": (
        "logging.basicConfig(level='INFO', format='%(message)s', force=True)",
        ["info loaded", "info careful"],
    ),
    "dictConfig": (
        "logging.config.dictConfig({'version': 1, 'root': {'level': 'ERROR'}})",
        [],
    ),
    "disable": ("logging.disable()", []),
}


@pytest.mark.parametrize("how", CONFIGURED)
def test_what_the_task_logs_is_in_the_log_and_its_settings_do_not_touch_ours(tmp_path, how):
    setting, expected = CONFIGURED[how]
    story = f"""
        import logging.config, warnings
        {setting}
        logging.getLogger("mine").info("loaded")
        logging.getLogger("mine").warning("careful")
        logging.getLogger("dlctl").info("of ours")
        warnings.warn("deprecated")
        """
    lines_after(tmp_path / "log", story)
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    *of_task, ours, warned = [f"{record['level']} {record['msg']}" for record in records]
    assert of_task == expected
    assert ours == "info of ours"
    assert warned.startswith("warning <string>:")
    assert "UserWarning: deprecated" in warned


def test_a_log_that_fails_while_a_print_is_logged_neither_hangs_nor_recurses(tmp_path):
    story = """
        class Broken:
            def __str__(self): raise RuntimeError
        logging.getLogger("dlctl").info("%s", Broken())
        print("still there")
        """
    assert lines_after(tmp_path / "log", story)[-1] == "still there"


def test_raw_output_alone_makes_the_log_turn_over(tmp_path):
    story = """
        logs.FILE_BYTES_MAX = 1000
        os.write(2, json.dumps({"msg": "x" * 2000}).encode() + b"\\n")
        handler.rotate_if_full()
        print("in the new file")
        """
    lines = lines_after(tmp_path / "log", "import json\n" + dedent(story))
    assert lines == ["in the new file"]
    assert "x" * 2000 in (tmp_path / "log.1").read_text()


def test_processes_that_load_data_lose_no_line_of_a_log_that_turns_over(tmp_path):
    """They stay in the part of the file that they have."""
    story = """
        logs.FILE_BYTES_MAX = 20_000
        turned, said = [os.pipe() for _ in range(4)], [os.pipe() for _ in range(4)]
        for n in range(4):
            if os.fork() == 0:
                for i in range(20):
                    print(f"loader {n} before {i}")
                os.write(said[n][1], b"x")
                os.read(turned[n][0], 1)
                for i in range(20):
                    print(f"loader {n} after {i}")
                os._exit(0)
        for reader, _ in said:
            os.read(reader, 1)
        inode = os.stat(path).st_ino
        while os.stat(path).st_ino == inode:
            print("x" * 1000)
        for _, writer in turned:
            os.write(writer, b"x")
        for _ in range(4):
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        print("end")
        """
    lines = lines_after(tmp_path / "log", story)
    assert lines == ["end"]
    older = (tmp_path / "log.1").read_text().splitlines()
    said = Counter(json.loads(line)["msg"] for line in older if "loader" in line)
    whole = [
        f"loader {n} {when} {i}"
        for n in range(4)
        for when in ("before", "after")
        for i in range(20)
    ]
    assert said == Counter(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]


def test_a_full_log_is_turned_over_only_by_the_process_that_it_belongs_to(tmp_path):
    story = """
        logs.FILE_BYTES_MAX = 1000
        if os.fork() == 0:
            for i in range(8):
                print(f"{i} " + "x" * 1000)
            os._exit(0)
        os.wait()
        print("mine")
        """
    assert lines_after(tmp_path / "log", story) == []
    older = [json.loads(line)["msg"] for line in (tmp_path / "log.1").read_text().splitlines()]
    assert [line.split()[0] for line in older] == [*map(str, range(8)), "mine"]


def test_a_fork_logs_although_other_threads_were_at_it(tmp_path):
    """One of them waits in the kernel, as on a slow disk, until its line is taken: the lock of the
    log is held in the fork for ever. Lines that were begun stay with the process that did.
    """
    story = """
        import signal
        def stuck():
            logging.getLogger("dlctl").info("y" * 100_000)
        there, (reader, writer) = os.dup(2), os.pipe()
        os.dup2(writer, 2)
        thread = threading.Thread(target=stuck, daemon=True)
        thread.start()
        os.read(reader, 1)
        print("begun, ", end="")
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os.dup2(there, 2)
            print("from the fork")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.dup2(there, 2)
        os.close(writer)
        while os.read(reader, 1 << 16): pass
        thread.join()
        print("and ended")
        """
    assert lines_after(tmp_path / "log", story) == ["from the fork", "begun, and ended"]


def test_a_signal_handler_prints_while_a_line_is_begun(tmp_path):
    story = """
        import signal
        signal.signal(signal.SIGALRM, lambda *_: print("tick"))
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for i in range(20_000): print("x", end="")
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("end")
        """
    lines = lines_after(tmp_path / "log", story)
    assert "tick" in {line.lstrip("x") for line in lines}
    assert lines[-1].endswith("end")


def test_a_line_for_which_there_was_no_room_does_not_spoil_the_next_one(tmp_path):
    story = """
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
        print("x" * 200)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        print("there is room again")
        """
    with pytest.raises(json.JSONDecodeError):
        lines_after(tmp_path / "log", story)
    torn, whole = (tmp_path / "log").read_text().splitlines()
    assert len(torn) == 100
    assert json.loads(whole)["msg"] == "there is room again"
