"""Which group a parameter is in, where its elements are, and patterns that are for none."""

from __future__ import annotations

import pytest

from dlctl.job.config import ParameterGroup
from dlctl.model import parameter_groups
from dlctl.model.flat import AVERAGED, CONSTANT, TRAINED, Layout, TensorEntry, slice_bounds
from dlctl.model.parameter_groups import NONE, GroupRun

GROUPS = (
    ParameterGroup(match=("*.bias", "*norm*"), weight_decay=0.0),
    ParameterGroup(match=("head.*",), lr_scale=0.1),
)
LAYOUT = Layout(
    (
        TensorEntry("embed.weight", TRAINED, (4, 2), "float32", ("head.weight",)),
        TensorEntry("frozen.bias", CONSTANT, (100,), "float32"),
        TensorEntry("a.weight", TRAINED, (3,), "float32"),
        TensorEntry("a.bias", TRAINED, (2,), "float32"),
        TensorEntry("norm.mean", AVERAGED, (100,), "float32"),
        TensorEntry("norm.weight", TRAINED, (2,), "float32"),
        TensorEntry("empty.bias", TRAINED, (0,), "float32"),
        TensorEntry("head.bias", TRAINED, (5,), "float32"),
    )
)
ELEMENTS = [1] * 8 + [NONE] * 3 + [0] * 9


def test_the_first_group_with_a_pattern_for_any_name_counts() -> None:
    assert parameter_groups.of_trained(GROUPS, LAYOUT) == [1, NONE, 0, 0, 0, 0]
    assert parameter_groups.group_of(GROUPS, ["x", "HEAD.bias"]) == 0
    assert parameter_groups.group_of(GROUPS, ["HEAD.weight"]) == NONE


def test_what_each_group_has_got_is_told() -> None:
    assert parameter_groups.described((), LAYOUT) == []
    assert parameter_groups.described(
        (*GROUPS, ParameterGroup(match=("x",), train=False)), LAYOUT
    ) == [
        "[[parameters]] *.bias, *norm*: 4 tensors of 9 values, weight_decay 0, lr x 1",
        "[[parameters]] head.*: 1 tensors of 8 values, lr x 0.1",
        "in no group: 1 tensors of 3 values",
    ]


@pytest.mark.parametrize("servers", range(1, 22))
def test_runs_are_the_elements_of_the_groups_on_every_shard(servers: int) -> None:
    found: list[int] = []
    for index in range(servers):
        lo, hi = slice_bounds(20, servers, index)
        begin = 0
        for end, group in parameter_groups.runs(GROUPS, LAYOUT, lo, hi):
            assert end > begin
            found += [group] * (end - begin)
            begin = end
        assert begin == hi - lo
    assert found == ELEMENTS


def test_neighbours_of_one_group_are_one_run() -> None:
    assert parameter_groups.runs(GROUPS, LAYOUT, 0, 20) == [
        GroupRun(8, 1),
        GroupRun(11, NONE),
        GroupRun(20, 0),
    ]


def test_patterns_that_match_nothing_are_found_with_the_names_that_are_close() -> None:
    names = ["blocks.0.attn.bias", "blocks.0.attn.weight", "embed.weight", "ln.weight"]
    groups = (
        ParameterGroup(match=("*.bias", "*.biases")),
        ParameterGroup(match=("embbed.*", "*")),
    )
    wrong = parameter_groups.unmatched(groups, names)
    assert wrong == ["*.biases", "embbed.*"]
    assert parameter_groups.close_to(wrong, names) == ["blocks.0.attn.bias", "embed.weight"]
    assert parameter_groups.close_to(["xyz"], names) == names
