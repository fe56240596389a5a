"""`keys reader` and `status --key`: a file for one who looks on; no other is overwritten."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dlctl.control import keys, reader


@pytest.fixture
def reachable(run_directory):
    """A run that can be reached over TCP; nobody listens there."""
    run = run_directory().run(control="tcp://127.0.0.1:9", control_key="x" * keys.KEY_LETTERS)
    keys.renew(run.path)
    return run


@pytest.mark.usefixtures("reachable")
def test_a_file_that_is_there_is_overwritten_only_with_force(own_place, dlctl_command):
    file, link = own_place / "bob.key", own_place / "link"
    file.write_text("a letter to bob")
    link.symlink_to("nowhere")
    for path in (file, link):
        ended = dlctl_command("keys", "reader", str(path))
        assert ended.code == 1
    assert (file.read_text(), link.is_symlink()) == ("a letter to bob", True)
    assert dlctl_command("keys", "reader", "--force", str(file)).code == 0
    assert reader.load(file).address == "tcp://127.0.0.1:9"


@pytest.mark.usefixtures("reachable")
def test_it_goes_to_standard_output_and_then_nothing_else_does(own_place, dlctl_command):
    words = [sys.executable, "-m", "dlctl", "keys", "reader", "-"]
    done = subprocess.run(words, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (own_place / "bob.key").touch(mode=0o600)
    (own_place / "bob.key").write_bytes(done.stdout)
    assert reader.load(own_place / "bob.key").address == "tcp://127.0.0.1:9"
    assert b"gives access to the status" in done.stderr
    code, out, err = dlctl_command("keys", "reader", "-", "--json")
    assert (code, out) == (2, "")
    assert "--json" in err


@pytest.mark.usefixtures("reachable")
def test_what_cannot_be_written_is_the_key_and_not_the_run(own_place, dlctl_command):
    code, _, err = dlctl_command("keys", "reader", str(own_place))
    assert (code, "directory" in err) == (2, True)
    code, _, err = dlctl_command("keys", "reader", "nowhere/bob.key")
    assert (code, err) == (
        2,
        "error: the output would be in a directory that does not exist\n"
        "  --> nowhere/bob.key\n"
        "  next: mkdir -p nowhere\n",
    )


@pytest.mark.usefixtures("reachable")
def test_who_looks_on_is_told_about_the_readers_key(own_place, dlctl_command):
    file = own_place / "bob.key"
    assert dlctl_command("status", "--key", str(file)).where == str(file)
    assert dlctl_command("keys", "reader", str(file)).code == 0
    file.chmod(0o644)
    err = dlctl_command("status", "--key", str(file)).err
    assert "(mode 0644)" in err
    assert "dlctl keys rotate" in err
    assert "start --fresh" not in err
