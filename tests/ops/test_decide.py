"""The tables of `start` and `recover`, row by row."""

from __future__ import annotations

from itertools import product

import pytest

from dlctl.ops.decide import RECOVER, START, Action, Facts, RunCase, SavedCase, Shards, decide

FAILED, STOPPED, LIVE, FINISHED = RunCase.FAILED, RunCase.STOPPED, RunCase.LIVE, RunCase.FINISHED


@pytest.mark.parametrize(
    ("facts", "action"),
    [
        (Facts(), Action.BEGIN),
        (Facts(fresh=True), Action.BEGIN),
        (Facts(LIVE), Action.ALREADY_RUNNING),
        (Facts(LIVE, back=True), Action.ALREADY_RUNNING),
        (Facts(LIVE, changed=True, back=True), Action.REFUSE_CHANGED),
        (Facts(LIVE, fresh=True, changed=True), Action.REFUSE_SECOND),
        (Facts(FINISHED, goal_reached=True), Action.OVER),
        (Facts(FINISHED, goal_reached=True, fresh=True), Action.BEGIN),
        (Facts(FINISHED), Action.READ_CHECKPOINTS),
        (Facts(FINISHED, saved=SavedCase.GOOD), Action.RESUME),
        (Facts(STOPPED, goal_reached=True), Action.READ_CHECKPOINTS),
        (Facts(STOPPED, saved=SavedCase.GOOD), Action.RESUME),
        (Facts(STOPPED, saved=SavedCase.OTHER), Action.BEGIN_FROM),
        (Facts(STOPPED, saved=SavedCase.DAMAGED), Action.REFUSE_DAMAGED),
        (Facts(STOPPED, saved=SavedCase.NONE), Action.BEGIN),
        (Facts(FAILED, fresh=True), Action.BEGIN),
        (Facts(FAILED), Action.LOOK_AT_SHARDS),
        (Facts(FAILED, begun=False), Action.READ_CHECKPOINTS),
        (Facts(FAILED, begun=False, saved=SavedCase.NONE), Action.BEGIN),
        (Facts(FAILED, shards=Shards.WHOLE), Action.CONTINUE),
        (Facts(FAILED, shards=Shards.AWAY), Action.WAIT_FOR_HOSTS),
        (Facts(FAILED, shards=Shards.LOST), Action.READ_CHECKPOINTS),
        (Facts(FAILED, shards=Shards.EMPTY), Action.READ_CHECKPOINTS),
        (Facts(FAILED, shards=Shards.WHOLE, back=True), Action.READ_CHECKPOINTS),
        (Facts(FAILED, shards=Shards.WHOLE, back=True, saved=SavedCase.GOOD), Action.RESUME),
        (Facts(FAILED, shards=Shards.WHOLE, back=True, saved=SavedCase.NONE), Action.REFUSE_KEPT),
        (Facts(FAILED, shards=Shards.AWAY, back=True, saved=SavedCase.NONE), Action.WAIT_FOR_HOSTS),
        (Facts(FAILED, shards=Shards.LOST, saved=SavedCase.DAMAGED), Action.REFUSE_DAMAGED),
        (Facts(FAILED, shards=Shards.LOST, saved=SavedCase.NONE), Action.BEGIN),
    ],
)
def test_start(facts: Facts, action: Action) -> None:
    assert decide(START, facts) is action


@pytest.mark.parametrize(
    ("facts", "action"),
    [
        (Facts(STOPPED), Action.OVER),
        (Facts(FINISHED, back=True), Action.OVER),
        (Facts(LIVE, back=True), Action.ALREADY_RUNNING),
        (Facts(RunCase.SILENT), Action.REFUSE_SILENT),
        (Facts(FAILED), Action.LOOK_AT_SHARDS),
        (Facts(FAILED, shards=Shards.WHOLE), Action.CONTINUE),
        (Facts(FAILED, shards=Shards.EMPTY), Action.CONTINUE),
        (Facts(FAILED, shards=Shards.LOST), Action.READ_CHECKPOINTS),
        (Facts(FAILED, shards=Shards.AWAY), Action.WAIT_FOR_HOSTS),
        (Facts(FAILED, shards=Shards.WHOLE, back=True), Action.READ_CHECKPOINTS),
        (Facts(FAILED, shards=Shards.WHOLE, back=True, saved=SavedCase.GOOD), Action.RESUME),
        (Facts(FAILED, shards=Shards.AWAY, back=True, saved=SavedCase.GOOD), Action.WAIT_FOR_HOSTS),
        (Facts(FAILED, shards=Shards.LOST, saved=SavedCase.GOOD), Action.RESUME),
        (Facts(FAILED, shards=Shards.LOST, saved=SavedCase.DAMAGED), Action.REFUSE_NOTHING),
        (
            Facts(FAILED, shards=Shards.WHOLE, back=True, saved=SavedCase.DAMAGED),
            Action.REFUSE_KEPT,
        ),
        (Facts(FAILED, shards=Shards.LOST, saved=SavedCase.NONE), Action.REFUSE_NOTHING),
    ],
)
def test_recover(facts: Facts, action: Action) -> None:
    assert decide(RECOVER, facts) is action


@pytest.mark.parametrize("table", [START, RECOVER], ids=["start", "recover"])
def test_whatever_the_facts_are_something_is_decided_and_looks_come_to_an_end(table) -> None:
    flags = (False, True)
    looks = {Action.LOOK_AT_SHARDS: "shards", Action.READ_CHECKPOINTS: "saved"}
    for words in product(
        RunCase, flags, flags, flags, flags, flags, [None, *Shards], [None, *SavedCase]
    ):
        facts = Facts(*words)
        action = decide(table, facts)
        if (asked := looks.get(action)) is not None:
            assert getattr(facts, asked) is None, facts
        if action is Action.CONTINUE:
            assert facts.shards in (Shards.WHOLE, Shards.EMPTY), facts
        if action in (Action.RESUME, Action.BEGIN_FROM):
            assert facts.saved in (SavedCase.GOOD, SavedCase.OTHER), facts
