"""A lead reads the options that were set live for all workers, if it names them."""

from __future__ import annotations

import pytest

from dlctl import registry
from dlctl.job.config import Choice, Job, JobFile
from dlctl.roles.coordinator.members.membership import Membership
from dlctl.roles.coordinator.records import EventContext
from dlctl.roles.coordinator.run_state import RunState
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.roles.protocol.keyring import Keyring
from dlctl.util.names import HOME_AGENT

WORKERS = ("worker-0", "worker-1")


def lead_of(name: str, members: Membership) -> MethodLead:
    job = JobFile(
        job=Job(name="a", task="train.py:task"),
        algorithm=Choice(name=name, options={"local_steps": 30}),
    )
    method = registry.load("algorithms", name)
    run = RunState("a-1", job, method, Keyring(None), EventContext(1.0), members)
    return MethodLead(run)


def test_it_sees_what_all_workers_have_and_else_what_the_job_file_says() -> None:
    members = Membership([HOME_AGENT], dict.fromkeys(WORKERS, HOME_AGENT), {})
    options = lead_of("decoupled-diloco", members).side.options
    assert options.local_steps == 30
    for name in WORKERS:
        members.daemons[name].settings = {"local_steps": 8}
    assert options.local_steps == 8
    members.daemons["worker-1"].settings = {"local_steps": 9}
    assert options.local_steps == 30
    assert options.quorum >= 1


def test_workers_without_the_value_count_and_those_that_are_gone_do_not() -> None:
    members = Membership([HOME_AGENT], dict.fromkeys((*WORKERS, "worker-2"), HOME_AGENT), {})
    options = lead_of("decoupled-diloco", members).side.options
    for name in WORKERS:
        members.daemons[name].settings = {"local_steps": 8}
    assert options.local_steps == 30
    members.daemons["worker-2"].begin(0.0)
    members.daemons["worker-2"].change_state("stopped")
    assert options.local_steps == 8


def test_a_lead_that_does_not_name_it_gets_no_old_value() -> None:
    members = Membership([HOME_AGENT], dict.fromkeys(WORKERS, HOME_AGENT), {})
    with pytest.raises(TypeError, match=r"Lead\.live"):
        _ = lead_of("streaming-diloco", members).side.options.local_steps
