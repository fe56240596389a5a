"""The hosts of a job file: who may be named there, and what does not go together."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlctl import jobfile
from dlctl.job.config import Host, JobFile

JOB = """[job]
name = "spread"
task = "train.py:task"

[servers]
count = 2
[workers]
count = 4
"""


@pytest.fixture
def load(tmp_path: Path):
    (tmp_path / "train.py").write_text("task = None\n")

    def load_text(text: str) -> JobFile:
        file = tmp_path / "job.toml"
        file.write_text(JOB + text)
        return jobfile.load(file)

    return load_text


@pytest.fixture
def problem(load):
    def only_problem(text: str) -> jobfile.JobFileProblem:
        with pytest.raises(jobfile.JobFileError) as refused:
            load(text)
        (found,) = refused.value.problems
        return found

    return only_problem


def test_hosts_are_read_with_their_defaults(load):
    job = load(
        '[[hosts]]\nworkers = 1\n[[hosts]]\nssh = "ann@gpu1"\ndata = "10.0.0.11"\nservers = 1\n'
    )
    assert job.hosts == (Host(workers=1), Host(ssh="ann@gpu1", data="10.0.0.11", servers=1))
    assert job.has_other_hosts
    assert job.uses_tcp
    assert job.is_encrypted


def test_this_machine_alone_is_no_other_host(load):
    job = load("[[hosts]]\nworkers = 4\n")
    assert not job.has_other_hosts
    assert not job.uses_tcp
    assert not load("").is_encrypted


def test_a_list_without_hosts_is_none(load, tmp_path):
    load("")
    file = tmp_path / "job.toml"
    file.write_text(f"hosts = []\n{file.read_text()}")
    assert jobfile.load(file).hosts == ()


def test_a_port_of_this_machine_alone_needs_tcp(load, problem):
    port = "[network]\nport = 7000\n"
    assert problem(f"[[hosts]]\nworkers = 4\n{port}").suggestion.endswith('transport = "tcp"')
    assert load(f'[[hosts]]\nssh = "gpu1"\n{port}').network.port == 7000


@pytest.mark.parametrize("name", ["gpu1", "gpu-1.lab.example", "ann@gpu1", "10.0.0.1", "::1", "a"])
def test_what_ssh_takes_as_a_host_is_taken(load, name):
    assert load(f'[[hosts]]\nssh = "{name}"\n').hosts[0].ssh == name


@pytest.mark.parametrize(
    "name",
    ["-oProxyCommand=x", "a;reboot", "$(id)", "user@host -p", "a b", "host:22", "a/b", "@host",
     "-x@h", "a\\nb", "fe80::1%eth0;id", "h" * 300, "ho\\u0000st", "höst", "user@"],
)  # fmt: skip
def test_what_could_be_something_else_than_a_host_is_refused_with_its_line(problem, name):
    found = problem(f'[[hosts]]\nssh = "{name}"\n')
    assert (found.line, found.key) == (10, "hosts.0.ssh"), found
    whys = ("no name", "no user", "dash", "takes", "300", "empty")
    assert any(why in found.message for why in whys)


@pytest.mark.parametrize("key", ["data", "bind"])
@pytest.mark.parametrize("address", ["10.0.0.1:5555", "10.0.0.1;id", "tcp://10.0.0.1", "*"])
def test_addresses_have_no_port_and_no_tricks(problem, key, address):
    found = problem(f'[[hosts]]\nssh = "gpu1"\n{key} = "{address}"\n')
    assert found.line == 11
    assert found.key.startswith("hosts.")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('[[hosts]]\nssh = "a"\n[[hosts]]\nssh = "a"\n', 12, '"a" is listed twice'),
        ("[[hosts]]\nworkers = 1\n[[hosts]]\nservers = 1\n", 11, "this machine is listed twice"),
        ('[[hosts]]\nssh = "a"\nworkers = 5\n', 11,
         "the hosts ask for 5 workers; count in [workers] is 4"),
        ('[[hosts]]\nworkers = 1\n[[hosts]]\nssh = "a"\nworkers = 2\n', 10,
         "the hosts ask for 3 workers; count in [workers] is 4"),
        ('[[hosts]]\nssh = "a"\nworkers = -1\n', 11, "must be >= 0"),
        ('[[hosts]]\nssh = "a"\npython = "python3"\n', 11, "must be a full path on that host"),
        ('[[hosts]]\npython = "/usr/bin/python3"\n', 10, "has a meaning only with ssh"),
        ("[[hosts]]\nworkers = 4\nbatch_size = 0\n", 11, "must be >= 1"),
        (
            '[[hosts]]\n[[hosts]]\nssh = "a"\nworkers = 0\nbatch_size = 4\n', 13,
            "has a meaning only with workers here",
        ),
        ('[[hosts]]\nssh = "a"\nprot = 1\n', 11, "unknown key"),
        ('[[hosts]]\nssh = "a"\n[network]\nencryption = "none"\n', 12,
         "without encryption only this machine can take part"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_its_line(problem, text, line, message):
    found = problem(text)
    assert found.message.startswith(message), found
    assert found.line == line, found


# ---------------------------------------------------------------- parts of the model by bandwidth

LAYOUT = '[servers]\ncount = 2\nlayout = "{}"\n'


@pytest.fixture
def lay_out(tmp_path: Path):
    (tmp_path / "train.py").write_text("task = None\n")

    def load_text(layout: str, hosts: str) -> JobFile:
        file = tmp_path / "job.toml"
        text = JOB.replace("[servers]\ncount = 2\n", LAYOUT.format(layout))
        file.write_text(f"{text}{hosts}")
        return jobfile.load(file)

    return load_text


FAST = '[[hosts]]\nssh = "a"\nbandwidth = "1Gbit/s"\n'
SLOW = '[[hosts]]\nssh = "b"\nbandwidth = "100Mbit/s"\n'


@pytest.mark.parametrize("layout", ["bandwidth", "shared-bandwidth"])
def test_a_layout_by_bandwidth_takes_that_of_the_hosts(lay_out, layout):
    assert lay_out(layout, FAST + SLOW).servers.layout == layout


@pytest.mark.parametrize(
    ("hosts", "key", "word"),
    [
        ("", "servers.layout", "machine"),
        (FAST + '[[hosts]]\nssh = "c"\n', "servers.layout", "c"),
        (FAST + '[[hosts]]\nssh = "c"\nbandwidth = "12"\n', "hosts.1.bandwidth", "unit"),
        (FAST + '[[hosts]]\nssh = "c"\nbandwidth = "off"\n', "hosts.1.bandwidth", "rate"),
        # All of them are clients only.
        (FAST + "servers = 0\n" + SLOW + "servers = 0\n", "hosts.0.servers", "servers"),
    ],
)
def test_a_layout_without_what_it_follows_is_refused(lay_out, hosts, key, word):
    with pytest.raises(jobfile.JobFileError) as refused:
        lay_out("bandwidth", hosts)
    (found,) = refused.value.problems
    assert found.key == key
    assert word in found.message
