"""A live option of a method changes in the servers, too, if the shard side says it reads it."""

from dataclasses import replace

import pytest
from server_lives import Keeping, Life, at_work

from dlctl import registry
from dlctl.algorithms import shapes
from dlctl.wire import messages as m
from dlctl.wire.messages import APPLIED, BUFFERED

METHOD = registry.load("algorithms", "toy-buffer")


class Undeclared(METHOD.shard):  # type: ignore[misc,name-defined]
    live = ()


def outcomes(life: Life, first: int, count: int) -> list[str]:
    return [outcome for seq in range(first, first + count) for _, outcome in life.push(seq)]


def test_the_next_push_is_handled_with_the_new_value_and_so_is_one_to_the_next_server() -> None:
    keeping = Keeping()
    life = at_work(keeping, algorithm=METHOD)
    assert outcomes(life, 0, 4) == [BUFFERED, BUFFERED, BUFFERED, APPLIED]
    life.tell(m.ChangeSettings(1, {"capacity": 2}))
    assert life.server.live.values()["capacity"] == 2
    assert outcomes(life, 4, 4) == [BUFFERED, APPLIED] * 2
    second = Life(keeping, 2, keep=True, algorithm=METHOD, settings={"capacity": 2})
    second.join()
    assert outcomes(second, 8, 2) == [BUFFERED, APPLIED]


def test_it_is_a_setting_of_workers_and_servers_and_the_others_are_of_workers() -> None:
    assert METHOD.live["capacity"].roles == ("worker", "server")
    assert METHOD.live["push_every_steps"].roles == ("worker",)


def test_a_side_that_reads_it_without_saying_so_is_an_error_and_not_an_old_value() -> None:
    life = at_work(Keeping(), algorithm=replace(METHOD, shard=Undeclared))
    with pytest.raises(TypeError, match=r"ShardSide\.live"):
        life.push(0)


def test_a_live_option_that_is_none_is_a_fault_of_the_method() -> None:
    wrong = type("Wrong", (METHOD.shard,), {"live": ("capacity", "nothing")})
    (fault,) = shapes.faults_of(replace(METHOD, shard=wrong))
    assert "nothing" in fault
