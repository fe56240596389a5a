"""The small machines of the control plane: membership, settings, checkpoints, averaged buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlctl.errors import NotFound, NotPermitted, RemoteProtocolError, UsageError
from dlctl.job import settings
from dlctl.job.config import Checkpoints, Choice, Job, JobFile
from dlctl.model.flat import AVERAGED, Layout, TensorEntry
from dlctl.roles.coordinator.checkpoint_mirror import CheckpointMirror
from dlctl.roles.coordinator.checkpointing import SAVE_S_MAX, Checkpointing
from dlctl.roles.coordinator.members.membership import BACKOFF_S, Membership, describe_exit
from dlctl.roles.coordinator.records import (
    AddEvent,
    BeginCheckpoint,
    CheckpointBegun,
    CheckpointEnded,
    CompleteCheckpoint,
    EventContext,
)
from dlctl.roles.coordinator.settings import ANSWER_S_MAX, SettingChanges
from dlctl.roles.protocol.context import EXIT_FENCED, EXIT_POISONED, EXIT_RESTART
from dlctl.roles.protocol.files import CheckFile, FileSealed, Transfers, saved_file
from dlctl.roles.protocol.limits import EVALUATE_S_MAX
from dlctl.roles.server.averaged_buffers import AveragedBuffers
from dlctl.util.names import HOME_AGENT
from dlctl.wire import messages as m
from dlctl.wire.machine import Effect, Note, Send


def members(*more: str) -> Membership:
    placed = dict.fromkeys(("server-0", "worker-0", "worker-1", *more), HOME_AGENT)
    known = Membership([HOME_AGENT], placed, before={"worker-1": 4})
    for daemon in known.daemons.values():
        daemon.begin(0.0)
        daemon.restore_state("running")
        daemon.asked_for_data = daemon.role == "worker"
    return known


def sent_to(effects: list[Effect]) -> list[str | bytes]:
    return [e.peer for e in effects if isinstance(e, Send)]


# ---------------------------------------------------------------- membership


def test_incarnations_count_on_over_executions_of_a_run() -> None:
    known = members()
    assert known.daemons["worker-0"].incarnation == 1
    assert known.daemons["worker-1"].incarnation == 5
    assert known.get("worker-1", 4) is None


def test_a_dead_worker_waits_longer_each_time() -> None:
    worker = members().daemons["worker-0"]
    pauses = []
    for _ in range(9):
        worker.begin(100.0)
        worker.ended(m.ProcessExited("worker-0", 1, -9, ("last words",)), 100.0)
        worker.back_off(100.0)
        assert worker.retry_at is not None
        pauses.append(worker.retry_at - 100.0)
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses[-1] == BACKOFF_S["worker"][1]


def test_only_those_who_work_take_part() -> None:
    known = members()
    assert known.live_slots() == (0, 1)
    known.daemons["worker-0"].drained = True
    assert known.live_slots() == (1,)
    known.daemons["worker-1"].ended(m.ProcessExited("worker-1", 5, 1, ()), 1.0)
    assert known.live_slots() == ()


def on_two_hosts(first: bool = True, second: bool = True) -> Membership:
    """Without any daemons beside the coordinator; the second host has no worker. `first`, `second`:
    whether the job has workers there.
    """
    agents = [HOME_AGENT, "agent-1", "agent-2"]
    placed = dict.fromkeys(("server-0", "worker-0"), "agent-1")
    takes = {"agent-1": first, "agent-2": second}
    known = Membership(agents, placed, before={}, takes_workers=takes)
    for daemon in known.daemons.values():
        daemon.begin(0.0)
        daemon.restore_state("running")
    return known


def test_a_worker_is_added_where_the_fewest_are_and_none_beside_the_coordinator() -> None:
    known = on_two_hosts()
    assert [known.add_worker().agent for _ in range(3)] == ["agent-2", "agent-1", "agent-2"]


def test_a_host_that_is_to_have_no_workers_gets_them_only_if_no_other_is_left() -> None:
    known = on_two_hosts(second=False)
    assert [known.add_worker().agent for _ in range(2)] == ["agent-1", "agent-1"]
    known.daemons["agent-1"].given_up_at = 20.0
    assert known.least_busy() == "agent-1", "it may come back"
    known.daemons["agent-1"].restore_state("failed")
    assert known.least_busy() == "agent-2"


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ("backoff", "running", "agent-2"),
        ("running", "backoff", "agent-1"),
        ("running", "failed", "agent-1"),
        ("backoff", "failed", "agent-1"),
        ("starting", "backoff", "agent-2"),
    ],
)
def test_a_worker_is_added_to_a_host_that_can_be_reached_or_may_come_back(
    first: str, second: str, chosen: str
) -> None:
    """Nobody tries again to start anything on a host that was given up."""
    known = on_two_hosts()
    for name, state in (("agent-1", first), ("agent-2", second)):
        known.daemons[name].restore_state(state)
        known.daemons[name].given_up_at = None if state == "running" else 20.0
    assert known.least_busy() == chosen


def test_a_wait_is_dated_from_its_beginning() -> None:
    worker = members().daemons["worker-0"]
    worker.report("fetching", "server-0", 5.0)
    worker.report("fetching", "server-0", 9.0)
    assert worker.waiting_since == 5.0
    worker.report("computing", "", 10.0)
    assert worker.waiting_since is None


def test_exits_are_told_in_words() -> None:
    assert describe_exit(0) == "exit 0"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-9, "out of memory") == "killed by SIGKILL (out of memory)"
    assert "fenced" in describe_exit(75)
    assert describe_exit(EXIT_POISONED).endswith("(nothing that it computes can be used)")
    assert describe_exit(EXIT_RESTART).endswith("(to be started again)")
    assert NotPermitted.exit_code not in (EXIT_FENCED, EXIT_POISONED, EXIT_RESTART)
    assert describe_exit(-62) == "killed by signal 62"


# ---------------------------------------------------------------- settings


def test_a_change_is_answered_when_all_have_answered() -> None:
    context, answers = EventContext(1.0), []
    changes = SettingChanges(context, members())
    changes.begin({"worker-0": {"push": 5.0}, "worker-1": {"push": 5.0}}, 0.0, answers.append)
    assert sent_to(context.clear()) == ["worker-0", "worker-1"]
    for name, now in (("worker-1", 0.002), ("worker-0", 0.003)):
        assert answers == []
        changes.on_changed(b"", m.Changed(1, name, {"push": None}, {"push": 5.0}), now)
    rows = answers[0]["changes"]
    assert [(r["name"], r["before"], r["after"]) for r in rows] == [
        ("worker-0", None, 5.0),
        ("worker-1", None, 5.0),
    ]
    assert answers[0]["missing"] == []


@pytest.mark.parametrize("value", [{"a": 1}, [1]])
def test_an_answer_with_what_no_setting_has_is_refused_and_still_waited_for(value: Any) -> None:
    context, answers = EventContext(1.0), []
    changes = SettingChanges(context, members())
    changes.begin({"worker-0": {"push": 5.0}}, 0.0, answers.append)
    for before, after in ((value, 5.0), (5.0, value)):
        with pytest.raises(RemoteProtocolError):
            changes.on_changed(b"", m.Changed(1, "worker-0", {"push": before}, {"push": after}), 1)
    changes.on_changed(b"", m.Changed(1, "worker-0", {"push": None}, {"push": 5.0}), 1.0)
    assert len(answers) == 1


def test_who_does_not_answer_is_named() -> None:
    context, answers = EventContext(1.0), []
    changes = SettingChanges(context, members())
    changes.begin({"worker-0": {"push": 5.0}, "worker-1": {"push": 5.0}}, 0.0, answers.append)
    changes.on_changed(b"", m.Changed(1, "worker-0", {"push": None}, {"push": 5.0}), 0.1)
    assert changes.deadline() == ANSWER_S_MAX
    changes.on_deadline(ANSWER_S_MAX)
    assert answers[0]["missing"] == ["worker-1"]


def test_who_does_not_answer_in_time_goes_on_being_asked_as_long_as_its_process_lives() -> None:
    context, known = EventContext(1.0), members()
    changes = SettingChanges(context, known)
    known.daemons["worker-1"].ended(m.ProcessExited("worker-1", 5, -9, ()), 1.0)
    changes.begin({"worker-0": {"push": 5.0}, "worker-1": {"push": 5.0}}, 0.0, lambda rows: None)
    changes.on_deadline(ANSWER_S_MAX)
    assert [key for key, _, _ in context.retries.waiting()] == [("change", "worker-0")]


def test_an_older_change_is_not_sent_again_on_top_of_a_newer_one() -> None:
    context, answers = EventContext(1.0), []
    changes = SettingChanges(context, members())
    changes.begin({"worker-0": {"push": 5.0, "fetch": 3.0}}, 0.0, answers.append)
    changes.begin({"worker-0": {"push": 7.0}}, 0.1, answers.append)
    first, second = {"push": 5.0, "fetch": 3.0}, {"push": 7.0, "fetch": 3.0}
    changes.on_changed(b"", m.Changed(1, "worker-0", {"push": None, "fetch": None}, first), 0.2)
    (again,) = context.retries.due(10.0)
    assert again.message == m.ChangeSettings(2, second)
    changes.on_changed(b"", m.Changed(2, "worker-0", first, second), 10.1)
    assert context.retries.deadline() is None
    keys = [[row["key"] for row in answer["changes"]] for answer in answers]
    assert keys == [["fetch", "push"], ["push"]]


def test_the_answer_to_a_newer_change_answers_the_older_ones_that_it_contains() -> None:
    context, answers = EventContext(1.0), []
    changes = SettingChanges(context, members())
    changes.begin({"worker-0": {"fetch": 3.0}}, 0.0, answers.append)
    changes.begin({"worker-0": {"push": 7.0}}, 0.1, answers.append)
    both = {"push": 7.0, "fetch": 3.0}
    changes.on_changed(b"", m.Changed(2, "worker-0", {"push": None, "fetch": None}, both), 0.2)
    shown = [[(row["key"], row["after"]) for row in answer["changes"]] for answer in answers]
    assert shown == [[("fetch", 3.0)], [("push", 7.0)]]


JOB = {
    "algorithm": {"name": "downpour", "options": {"push_every_steps": 1}},
    "compression": {"name": "topk", "options": {"density": 0.5}},
    "optimizer": {"name": "sgd", "options": {"lr": 0.1, "weight_decay": 0.5}},
    "workers": {"count": 2, "batch_size": 8},
}


class Asking:
    """What is asked of a coordinator of two workers and a server."""

    def __init__(self, *more: str, **job: Any) -> None:
        self.context, self.members = EventContext(1.0), members(*more)
        self.changes = SettingChanges(self.context, self.members, settings.of_job(JOB | job))
        self.answers: list[Any] = []

    def ask(self, *patterns: str, **texts: str) -> dict[str | bytes, Any]:
        """Daemon -> what it is sent."""
        self.changes.request(patterns, texts, 0.0, self.answers.append)
        sent = [effect for effect in self.context.clear() if isinstance(effect, Send)]
        return {e.peer: e.message.settings for e in sent if isinstance(e.message, m.ChangeSettings)}

    def is_unchanged(self) -> bool:
        return not self.context.clear() and not any(
            daemon.settings for daemon in self.members.daemons.values()
        )


def test_several_keys_go_to_those_who_have_them_in_one_message_each() -> None:
    asking = Asking()
    assert asking.ask(push="5MB/s", density="0.01", lr="0.2", push_every_steps="auto") == {
        "server-0": {"lr": 0.2},
        "worker-0": {"push": 5e6, "density": 0.01, "push_every_steps": "auto"},
        "worker-1": {"push": 5e6, "density": 0.01, "push_every_steps": "auto"},
    }
    assert asking.ask("worker-*", push="off", density="1") == {
        "worker-0": {"push": None, "density": 1.0, "push_every_steps": "auto"},
        "worker-1": {"push": None, "density": 1.0, "push_every_steps": "auto"},
    }


def test_what_the_shards_of_a_model_do_not_have_in_common_is_told() -> None:
    asking = Asking("server-1")
    for server in asking.members.of_role("server"):
        server.metrics = {"settings": {"lr": 0.1, "log_level": "info"}}
    assert asking.changes.uneven() == {}
    asking.ask("server-0", lr="0.2", log_level="debug")
    after = {"lr": 0.2, "log_level": "debug"}
    asking.changes.on_changed(b"", m.Changed(1, "server-0", {}, after), 0.1)
    uneven = {"lr": {"server-0": 0.2, "server-1": 0.1}}
    assert asking.answers[-1]["uneven"] == asking.changes.uneven() == uneven
    asking.ask("worker-0", push="5MB/s")
    assert asking.changes.uneven() == uneven, "workers may differ"
    asking.ask(lr="0.3")
    assert asking.changes.uneven() == {}


def test_the_one_answer_shows_every_key_of_every_daemon_as_people_write_it() -> None:
    asking = Asking()
    asking.ask(push="5MB/s", lr="0.2", log_level="debug")
    for name, before, after in (
        ("server-0", {"lr": 0.1, "log_level": "info"}, {"lr": 0.2, "log_level": "debug"}),
        ("worker-1", {"push": None, "log_level": "info"}, {"push": 5e6, "log_level": "debug"}),
        ("worker-0", {"push": 1e3, "log_level": "info"}, {"push": 5e6, "log_level": "debug"}),
        ("agent-0", {"log_level": "info"}, {"log_level": "debug"}),
    ):
        assert asking.answers == []
        asking.changes.on_changed(b"", m.Changed(1, name, before, after), 0.1)
    (answer,) = asking.answers
    assert [(row["name"], row["key"], row["old"], row["new"]) for row in answer["changes"]] == [
        ("agent-0", "log_level", "info", "debug"),
        ("server-0", "log_level", "info", "debug"),
        ("server-0", "lr", "0.1", "0.2"),
        ("worker-0", "log_level", "info", "debug"),
        ("worker-0", "push", "1 kB/s", "5 MB/s"),
        ("worker-1", "log_level", "info", "debug"),
        ("worker-1", "push", "off", "5 MB/s"),
    ]


@pytest.mark.parametrize(
    ("patterns", "texts", "error"),
    [
        ([], {"push": "5MB/s", "lr": "0"}, r"^lr: must be > 0 and <= 1000000"),
        ([], {"lr": "0.2", "push": "500"}, "^push: "),
        ([], {"push": "off", "lr": "3"}, r"^lr: lr \* weight_decay must be <= 1, .*got 3 \* 0.5"),
        ([], {"push": "off", "psuh": "off"}, 'is called "psuh"; did you mean "push"'),
        ([], {"push": "off", "local_steps": "4"}, 'is called "local_steps"; '),
        ([], {"push": "off", "batch_size": "4"}, 'is called "batch_size"; '),
        ([], {}, "nothing to set"),
        (["worker-7"], {"push": "off"}, 'no daemon is called "worker-7"; did you mean "worker-'),
        (["worker-0", "server-*"], {"push": "off"}, r"server-\* has no push: .* of workers"),
        (["coordinator"], {"log_level": "debug"}, "of agents and servers and workers"),
    ],
)
def test_if_anything_cannot_be_set_nothing_is(
    patterns: list[str], texts: dict[str, str], error: str
) -> None:
    asking = Asking()
    with pytest.raises((UsageError, NotFound), match=error):
        asking.ask(*patterns, **texts)
    assert asking.is_unchanged()


def test_a_key_that_only_this_jobs_method_declares_can_be_set() -> None:
    def fruits(text: str) -> int:
        if not text.endswith(" apples"):
            raise ValueError(f'"{text}" is no number of apples')
        return int(text.removesuffix(" apples"))

    basket = settings.Setting(help="fruits", parse=fruits, format=lambda count: f"{count} apples")
    context, answers = EventContext(1.0), []
    live = settings.of_job(JOB | {"algorithm": {"name": "orchard"}}, {"basket": basket})
    changes = SettingChanges(context, members(), live)
    with pytest.raises(UsageError, match=r'^basket: .*"3"'):
        changes.request(["worker-*"], {"basket": "3"}, 0.0, answers.append)
    changes.request(["worker-1"], {"basket": "3 apples"}, 0.0, answers.append)
    assert sent_to(context.clear()) == ["worker-1"]
    changes.on_changed(b"", m.Changed(1, "worker-1", {"basket": 1}, {"basket": 3}), 0.1)
    (row,) = answers[0]["changes"]
    assert (row["after"], row["old"], row["new"]) == (3, "1 apples", "3 apples")


def test_a_change_stays_with_the_name_for_its_next_incarnation() -> None:
    known = members()
    SettingChanges(EventContext(1.0), known).begin(
        {"worker-0": {"density": 0.5}}, 0.0, lambda rows: None
    )
    known.daemons["worker-0"].begin(1.0)
    assert known.daemons["worker-0"].settings == {"density": 0.5}


# ---------------------------------------------------------------- checkpoints


SAVED_AT = 0.2


class Saving:
    def __init__(self, every_s: float = 60.0, more: tuple[str, ...] = ()) -> None:
        self.context, self.members, self.rows = EventContext(1.0), members(*more), []  # type: ignore[var-annotated]
        self.job = JobFile(
            job=Job(name="saving", task="none"), checkpoints=Checkpoints(every_s=every_s),
            compression=Choice(name="topk"),
        )  # fmt: skip
        mirror = CheckpointMirror(self.context, "", lambda: None)
        self.machine = Checkpointing(
            self.context, self.members, self.job, 7, Transfers(self.context), mirror
        )

    def begin(self) -> list[Effect]:
        self.machine.begin(100, {"size": 2}, 0.0, self.rows.append)
        return self.context.clear()

    def begun(self, error: str = "") -> list[Effect]:
        self.machine.on_event(CheckpointBegun(8, "" if error else "/ckpt", error), 0.1)
        return self.context.clear()

    def saved(self, name: str, error: str = "", damage: str = "") -> list[Effect]:
        """`error`: what it says itself. damage: what is wrong with its file, as who looks at it
        says.
        """
        state: dict[str, Any] = {"lo": 0, "hi": 2} if name.startswith("server") else {}
        file = "" if error else saved_file(name)
        self.machine.on_saved(b"", m.Saved(8, name, file, "hash", 10, state, error), SAVED_AT)
        return self.looked_at(damage)

    def looked_at(self, damage: str = "") -> list[Effect]:
        effects = self.context.clear()
        for check in [effect for effect in effects if isinstance(effect, CheckFile)]:
            effects.remove(check)
            self.machine.transfers.on_sealed(FileSealed(check.file, damage), SAVED_AT)
        return [*effects, *self.context.clear()]


def under_way(*saved: str) -> Saving:
    """A checkpoint that these daemons have saved already."""
    saving = Saving()
    saving.begin()
    saving.begun()
    for name in saved:
        saving.saved(name)
    return saving


def test_a_checkpoint_is_complete_when_its_manifest_is_written() -> None:
    saving = Saving()
    assert saving.begin() == [BeginCheckpoint(8, 100)]
    assert saving.machine.waits_for() == ["a directory for it"]
    assert sent_to(saving.begun()) == ["server-0", "worker-0", "worker-1"]
    assert saving.machine.waits_for() == ["server-0", "worker-0", "worker-1"]
    assert saving.saved("server-0") + saving.saved("worker-0") == []
    (complete,) = saving.saved("worker-1")
    assert saving.machine.waits_for() == ["the manifest"]
    assert isinstance(complete, CompleteCheckpoint)
    assert [shard["name"] for shard in complete.manifest["shards"]] == ["server-0"]
    assert complete.manifest["shards"][0]["hi"] == 2
    assert saving.rows == []
    saving.machine.on_event(CheckpointEnded(8, ""), 0.3)
    assert saving.rows[0]["error"] == ""
    assert saving.machine.newest == saving.rows[0]


@pytest.mark.parametrize(("taken", "is_of_use"), [((3, 3), True), ((3, 4), False)])
def test_a_checkpoint_for_another_cut_fails_if_servers_could_not_continue_from_it(
    taken: tuple[int, int], is_of_use: bool
) -> None:
    """Their shards are dropped for it. Here one has refused a push that the other has taken."""
    saving = Saving(more=("server-1",))
    saving.machine.begin(100, {"size": 2}, 0.0, saving.rows.append, of_servers=True)
    assert sent_to(saving.begun()) == ["server-0", "server-1"]
    for number, count in enumerate(taken):
        state = {"lo": number, "hi": number + 1, "counters": {"buffered": count, "updates": count}}
        message = m.Saved(
            8, f"server-{number}", saved_file(f"server-{number}"), "hash", 10, state, ""
        )
        saving.machine.on_saved(b"", message, SAVED_AT)
    effects = saving.looked_at()
    assert any(isinstance(effect, CompleteCheckpoint) for effect in effects) == is_of_use
    assert [bool(row["error"]) for row in saving.rows] == ([] if is_of_use else [True])


def test_two_requests_at_once_are_one_checkpoint() -> None:
    saving = Saving()
    saving.begin()
    assert saving.begin() == []
    saving.begun("disk full")
    assert [row["error"] for row in saving.rows] == ["disk full", "disk full"]


def test_an_error_of_one_daemon_fails_the_checkpoint_and_not_the_newest_one() -> None:
    saving = under_way()
    saving.saved("server-0", "no space left")
    saving.saved("worker-0")
    saving.saved("worker-1")
    assert saving.rows[0]["error"] == "server-0: no space left"
    assert saving.machine.newest is None
    assert "no space left" in saving.machine.last_error


def test_a_checkpoint_is_complete_without_a_worker_that_cannot_save() -> None:
    saving = under_way("server-0", "worker-0")
    (_, complete) = saving.saved("worker-1", "no space left")
    assert isinstance(complete, CompleteCheckpoint)
    saving.machine.on_event(CheckpointEnded(8, ""), 0.3)
    assert (saving.rows[0]["error"], saving.rows[0]["without"]) == ("", ["worker-1"])


def test_a_worker_that_dies_meanwhile_is_not_waited_for() -> None:
    saving = under_way("server-0", "worker-0")
    saving.machine.on_gone("worker-1", 0.3)
    assert isinstance(saving.context.clear()[-1], CompleteCheckpoint)


@pytest.mark.parametrize("leaves_residuals", [True, False])
def test_a_checkpoint_without_a_residual_says_so_in_the_history_if_there_was_one(
    leaves_residuals: bool,
) -> None:
    saving = under_way("server-0", "worker-0")
    if not leaves_residuals:
        saving.machine.job = replace(saving.job, compression=Choice(name="none"))
    saving.machine.on_deadline(SAVED_AT + SAVE_S_MAX)
    saving.machine.on_event(CheckpointEnded(8, ""), SAVED_AT + SAVE_S_MAX)
    events = [effect for effect in saving.context.clear() if isinstance(effect, AddEvent)]
    expected = [("checkpoint", "worker-1")] if leaves_residuals else []
    assert [(event.kind, event.daemon) for event in events] == expected
    assert all(event.text.endswith("worker-1's residual") for event in events)
    assert saving.rows[0]["without"] == [name for _, name in expected]


def test_a_checkpoint_is_completed_once_however_often_a_host_is_said_to_be_away() -> None:
    saving = under_way("server-0", "worker-0")
    for _ in range(3):
        saving.machine.on_gone("worker-1", 0.3, lost="its host is gone")
    assert [type(effect) for effect in saving.context.clear()] == [Note, CompleteCheckpoint]


def test_a_checkpoint_without_a_shard_is_none() -> None:
    saving = under_way("worker-0", "worker-1")
    saving.machine.on_gone("server-0", 0.3)
    assert saving.rows[0]["error"].startswith("server-0: ")


def test_a_checkpoint_is_given_up_in_time_and_names_who_was_late() -> None:
    saving = under_way("worker-0")
    saving.machine.on_deadline(SAVED_AT + SAVE_S_MAX)
    assert "server-0, worker-1" in saving.rows[0]["error"]
    assert saving.context.retries.deadline() is None


def test_a_checkpoint_does_without_workers_that_push_too_seldom_to_save_in_time() -> None:
    saving = under_way("server-0", "worker-0")
    saving.machine.on_deadline(SAVED_AT + SAVE_S_MAX)
    complete = next(e for e in saving.context.clear() if isinstance(e, CompleteCheckpoint))
    assert [worker["name"] for worker in complete.manifest["workers"]] == ["worker-0"]
    assert saving.context.retries.deadline() is None
    assert saving.machine.deadline() is None


def test_who_says_for_ever_that_it_evaluates_is_given_up_when_that_was_said() -> None:
    saving = under_way("server-0", "worker-0")
    saving.members.daemons["worker-1"].phase = "evaluating"
    latest = EVALUATE_S_MAX + SAVE_S_MAX
    for second in range(1, int(latest) - 1):
        saving.machine.on_deadline(float(second))
        assert saving.machine.to_json() == {"at": 0.0, "waiting": "worker-1", "gives_up_at": latest}
    saving.machine.on_deadline(latest)
    assert saving.machine.late() == []
    assert [e for e in saving.context.clear() if isinstance(e, CompleteCheckpoint)]


def test_an_evaluation_gives_a_server_no_more_time() -> None:
    saving = under_way("worker-0")
    saving.members.daemons["worker-1"].phase = "evaluating"
    for second in range(1, 1 + int(SAVED_AT + SAVE_S_MAX)):
        saving.machine.on_deadline(float(second))
    assert saving.rows == []
    saving.machine.on_deadline(SAVED_AT + SAVE_S_MAX)
    assert "server-0, worker-1" in saving.rows[0]["error"]


def test_a_checkpoint_does_without_a_file_of_a_worker_that_is_not_what_it_says() -> None:
    saving = under_way("server-0", "worker-0")
    effects = saving.saved("worker-1", damage="worker-1.safetensors: its SHA-256 is another one")
    (note,) = [effect for effect in effects if isinstance(effect, Note)]
    assert note.text.startswith(
        "the checkpoint is saved without worker-1: worker-1.safetensors: its"
    )
    (complete,) = [effect for effect in effects if isinstance(effect, CompleteCheckpoint)]
    assert [worker["name"] for worker in complete.manifest["workers"]] == ["worker-0"]
    saving.machine.on_event(CheckpointEnded(8, ""), 0.3)
    assert (saving.rows[0]["error"], saving.rows[0]["without"]) == ("", ["worker-1"])


@pytest.mark.parametrize("name", ["worker-1", "server-0"])
@pytest.mark.parametrize(
    ("file", "sha256"),
    [("worker-0.safetensors", "hash"), ("../x", "hash"), ("manifest.json", "hash"), ("own", "")],
)
def test_a_file_with_another_name_is_left_out_or_ends_the_checkpoint(
    name: str, file: str, sha256: str
) -> None:
    saving = under_way(*({"server-0", "worker-0", "worker-1"} - {name}))
    file = saved_file(name) if file == "own" else file
    saving.machine.on_saved(b"", m.Saved(8, name, file, sha256, 10, {}, ""), SAVED_AT)
    effects = saving.looked_at()
    if name.startswith("worker"):
        (complete,) = [effect for effect in effects if isinstance(effect, CompleteCheckpoint)]
        assert [worker["name"] for worker in complete.manifest["workers"]] == ["worker-0"]
    else:
        assert saving.rows[0]["error"].startswith("server-0: ")


def test_a_checkpoint_is_not_complete_before_what_workers_have_saved_is_looked_at() -> None:
    saving = under_way("server-0", "worker-0")
    saved = m.Saved(8, "worker-1", saved_file("worker-1"), "hash", 10, {}, "")
    saving.machine.on_saved(b"", saved, SAVED_AT)
    (check,) = saving.context.clear()
    assert check == CheckFile("ckpt/ckpt/worker-1.safetensors", 10, "hash")
    assert saving.machine.late() == ["worker-1"]
    assert saving.machine.deadline() == SAVED_AT + SAVE_S_MAX
    saving.machine.on_gone("worker-1", SAVED_AT)
    saving.machine.transfers.on_sealed(FileSealed(check.file, ""), SAVED_AT)
    (complete,) = saving.context.clear()
    assert isinstance(complete, CompleteCheckpoint)
    assert [worker["name"] for worker in complete.manifest["workers"]] == ["worker-0", "worker-1"]


def test_a_file_that_is_long_looked_at_is_waited_for_as_long_as_it_is_read() -> None:
    """Also by those whose turn it is not yet."""
    saving = under_way("server-0")
    for name in ("worker-0", "worker-1"):
        saved = m.Saved(8, name, saved_file(name), "hash", 10, {}, "")
        saving.machine.on_saved(b"", saved, SAVED_AT)
    saving.context.clear()
    read_at = SAVED_AT
    for _ in range(5):
        read_at += SAVE_S_MAX - 1.0
        saving.machine.on_deadline(read_at)
        saving.machine.transfers.on_reading(read_at)
    assert saving.machine.late() == ["worker-0", "worker-1"]
    assert saving.machine.deadline() == read_at + SAVE_S_MAX
    saving.machine.on_deadline(read_at + SAVE_S_MAX)
    assert saving.machine.late() == []


def test_checkpoints_come_at_the_set_interval_or_not_at_all() -> None:
    machine, never = Saving().machine, Saving(every_s=0).machine
    machine.schedule(10.0)
    never.schedule(10.0)
    assert [machine.is_due(t) for t in (10.0, 69.9, 70.0)] == [False, False, True]
    assert never.deadline() is None


# ---------------------------------------------------------------- averaged buffers


def buffers() -> AveragedBuffers:
    layout = Layout(
        (
            TensorEntry("mean", AVERAGED, (2,), "float32"),
            TensorEntry("batches", AVERAGED, (), "int64"),
        )
    )
    return AveragedBuffers(layout, np.array([0.0, 0.0, 5.0]))


def test_buffers_are_averaged_by_samples_and_counters_are_the_busiest_ones() -> None:
    kept = buffers()
    assert kept.average().tolist() == [0.0, 0.0, 5.0]
    kept.push(0, 100, np.array([1.0, 2.0, 7.0]))
    kept.push(1, 300, np.array([5.0, 6.0, 9.0]))
    assert kept.average().tolist() == [4.0, 5.0, 9.0]


def test_the_newest_buffers_of_a_replica_replace_its_older_ones() -> None:
    kept = buffers()
    kept.push(0, 100, np.array([1.0, 2.0, 7.0]))
    kept.push(0, 200, np.array([3.0, 4.0, 8.0]))
    assert kept.average().tolist() == [3.0, 4.0, 8.0]


def test_buffers_that_do_not_fit_or_are_poison_are_not_taken() -> None:
    kept = buffers()
    assert not kept.push(0, 100, np.zeros(2))
    assert not kept.push(0, 100, np.array([np.nan, 0.0, 1.0]))
    assert kept.average().tolist() == [0.0, 0.0, 5.0]
