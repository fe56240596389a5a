"""A server dies and another one takes its place: nothing acknowledged is lost, nothing is twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from server_lives import KEY, RUN, SIZE, Keeping, KillAt, Killed, Life, at_work

from dlctl import registry
from dlctl.optim.adagrad import Adagrad
from dlctl.roles.protocol.context import COORDINATOR
from dlctl.roles.protocol.effects import LoadArrays
from dlctl.roles.protocol.token import sign
from dlctl.roles.server.server import LOOK_S
from dlctl.shards.base import Spec, Storage
from dlctl.shards.errors import StateHeld
from dlctl.util.names import WAITS_FOR_SPACE
from dlctl.wire import codec
from dlctl.wire import messages as m
from dlctl.wire.machine import (
    DeadlineReached,
    Exit,
    Note,
    Send,
    StopRequested,
)
from dlctl.wire.messages import APPLIED, DUPLICATE, HELD, LATE, REFUSED, Packed

NOTHING = np.zeros(0)

# ---------------------------------------------------------------- what survives


def test_a_server_that_takes_another_one_s_place_knows_what_was_acknowledged() -> None:
    keeping = Keeping()
    first = at_work(keeping)
    assert [first.push(0), first.push(1)] == [[(0, APPLIED)], [(1, APPLIED)]]
    second = Life(keeping, 2, keep=True)
    assert second.answer() == m.Serving("server-0", "ipc://x", initialised=True)
    assert (second.w, second.version) == ([2, 0, 0, 0], 2)
    joined = second.join()
    assert (joined.term, joined.initialised, joined.next_seq) == (2, True, 2)
    assert second.push(1) == [(1, DUPLICATE)]
    assert second.push(2) == [(2, APPLIED)]
    assert second.w == [3, 0, 0, 0]


@pytest.mark.parametrize(
    ("last_step", "samples", "outcome"),
    [(7, 64, APPLIED), (7, 65, REFUSED), (9, 192, APPLIED), (6, 0, APPLIED), (6, 1, REFUSED)],
)
def test_a_push_has_no_more_samples_than_its_steps(last_step, samples, outcome) -> None:
    """From step 7 on, of 64 samples each at most. A refused push is settled: the next counts."""
    life = at_work(Keeping())
    push = replace(life.message(0), last_step=last_step, samples=samples)
    (ack,) = life.ask(push)
    assert ack.outcome == outcome
    assert ("samples" in ack.reason) == (outcome == REFUSED)
    assert life.push(1) == [(1, APPLIED)]


def test_no_sum_of_samples_outgrows_what_the_next_server_reads() -> None:
    keeping = Keeping()
    first = at_work(keeping)
    assert first.server.serving is not None
    first.server.serving.shard.samples = m.NATURAL_MAX - 1
    assert first.push(0) == [(0, APPLIED)]
    second = Life(keeping, 2, keep=True)
    assert second.server.serving is not None
    assert second.server.serving.shard.samples == m.NATURAL_MAX
    (parameters,) = [a for a in _fetched(second) if isinstance(a, m.Parameters)]
    assert codec.decode([bytes(frame) for frame in codec.encode(parameters)])


def _fetched(life: Life) -> list[m.Message]:
    life.join()
    return life.ask(m.Fetch(0, 1, 1, 0))


def test_a_server_that_waits_for_room_looks_again_by_itself() -> None:
    keeping = Keeping("disk")
    assert at_work(keeping).push(0) == [(0, APPLIED)]
    keeping.log.disk.tight = 1
    second = Life(keeping, 2, keep=True)
    assert second.server.phase() == (WAITS_FOR_SPACE, "")
    now, effects = 0.0, []
    for _ in range(5):
        now = second.server.deadline()
        assert now is not None
        effects += second.server.handle(DeadlineReached(), now)
    assert not [effect for effect in effects if isinstance(effect, Note | Exit)], "it was told once"
    keeping.log.disk.tight = 0
    until = now + LOOK_S
    while second.server.serving is None and now < until:
        now = second.server.deadline()
        second.effects = second.server.handle(DeadlineReached(), now)
    assert m.Serving("server-0", "ipc://x", initialised=True) in [
        effect.message for effect in second.effects if isinstance(effect, Send)
    ]
    assert (second.w, second.version) == ([1, 0, 0, 0], 1)


def test_a_server_without_room_for_its_part_of_another_cut_waits_for_room_too() -> None:
    """The run is under way, and the checkpoint of the cut has the values."""
    keeping = Keeping("disk")
    assert at_work(keeping).push(0) == [(0, APPLIED)]
    keeping.log.disk.tight = 1
    second = Life(keeping, 2, restore="ckpt/9", cut=3)
    assert second.server.phase() == (WAITS_FOR_SPACE, "")
    assert not [effect for effect in second.effects if isinstance(effect, Exit)]
    keeping.log.disk.tight = 0
    now = second.server.deadline()
    assert now is not None
    effects = second.server.handle(DeadlineReached(), now + LOOK_S)
    (load,) = [effect for effect in effects if isinstance(effect, LoadArrays)]
    assert (load.directory, load.own) == ("ckpt/9", 0)


def test_initial_values_of_another_type_are_refused() -> None:
    """What is finite in float64 may be infinite in the shard."""
    life = Life(Keeping())
    life.join()
    good = (np.zeros(SIZE, "f4"), np.array([1.0, 2.0]))
    for which, dtype in ((0, "f8"), (1, "f4")):
        arrays = list(good)
        arrays[which] = arrays[which].astype(dtype) + 1e30
        life.ask(m.Initialise(0, 1, *arrays))
        assert not life.join().initialised
    life.ask(m.Initialise(0, 1, *good))
    assert life.join().initialised


@pytest.mark.parametrize("which", range(2))
@pytest.mark.parametrize("change", [-1, 1])
def test_initial_values_of_another_length_are_refused(which: int, change: int) -> None:
    life = Life(Keeping())
    life.join()
    lengths = [SIZE, 2]
    lengths[which] += change
    arrays = [np.zeros(n, d) for n, d in zip(lengths, ("f4", "f8"), strict=True)]
    life.ask(m.Initialise(0, 1, *arrays))
    assert not life.join().initialised


def test_who_shows_a_token_of_another_epoch_is_not_answered_and_fences_nobody() -> None:
    life = at_work(Keeping())
    effects = life.tell(m.Join(RUN, 0, 2, sign(KEY, RUN, 0, 1)), b"stranger")
    assert [type(effect) for effect in effects] == [Note]
    assert life.push(0) == [(0, APPLIED)]


def test_a_server_in_the_place_of_one_that_was_closed_for_good_applies_nothing_either() -> None:
    keeping = Keeping()
    first = at_work(keeping)
    first.push(0)
    first.tell(m.Save(1, ".", is_last=True))
    second = Life(keeping, 2, keep=True)
    second.join()
    assert second.push(1) == []
    assert second.w == [1, 0, 0, 0]
    second.tell(m.Reopen(1))
    assert second.push(1) == [(1, APPLIED)]


def test_members_who_are_told_again_are_not_written_down_again() -> None:
    """They are told with every report of a server."""
    keeping = Keeping()
    life = at_work(keeping)
    life.tell(m.Members((0, 1)))
    written = bytes(keeping.buffer)
    life.tell(m.Members((0, 1)))
    assert bytes(keeping.buffer) == written
    life.tell(m.Members((0,)))
    assert bytes(keeping.buffer) != written


def test_a_worker_of_before_has_to_join_again_before_it_pushes() -> None:
    keeping = Keeping()
    at_work(keeping).push(0)
    second = Life(keeping, 2, keep=True)
    second.term = 1
    assert second.ask(second.message(1)) == [m.JoinAgain(0, 2)]
    assert second.w == [1, 0, 0, 0]


def test_the_optimiser_goes_on_with_its_slots_and_its_rate_comes_with_the_settings() -> None:
    alone, keeping = at_work(Keeping(), optimizer=Adagrad), Keeping()
    first = at_work(keeping, optimizer=Adagrad)
    for life in (alone, first):
        life.tell(m.ChangeSettings(1, {"lr": 0.25}))
        life.push(0, (3, 0, -1, 2))
    second = Life(keeping, 2, keep=True, optimizer=Adagrad)
    assert second.server.live.values()["lr"] == 0.25
    second.join()
    for life in (alone, second):
        life.push(1, (4, 1, 1, 1))
    assert second.w == alone.w
    changed = Life(keeping, 3, keep=True, optimizer=Adagrad, settings={"lr": 0.5})
    assert changed.server.live.values()["lr"] == 0.5


def test_buffers_are_the_initial_ones_until_replicas_push_theirs_again() -> None:
    keeping = Keeping()
    first = at_work(keeping)
    first.ask(m.PushBuffers(0, 1, 10, np.array([5.0, 6.0])))
    second = Life(keeping, 2, keep=True)
    second.join()
    (buffers,) = second.ask(m.FetchBuffers(0, 1, 1))
    assert buffers.averaged.tolist() == [1, 2]
    second.ask(m.PushBuffers(0, 1, 10, np.array([5.0, 6.0])))
    (buffers,) = second.ask(m.FetchBuffers(0, 1, 2))
    assert buffers.averaged.tolist() == [5, 6]


def test_a_worker_whose_buffers_are_refused_is_named_once() -> None:
    life = at_work(Keeping())
    notes = []
    for slot, term in ((0, 1), (1, 1), (1, 2)):
        life.join(slot, term)
        for _ in range(3):
            effects = life.tell(m.PushBuffers(slot, term, 8, np.full(2, np.nan)), b"worker")
            notes += [effect.text for effect in effects if isinstance(effect, Note)]
    assert [text.partition(":")[0] for text in notes] == ["worker-0", "worker-1", "worker-1"]


def test_an_epoch_that_has_joined_fences_the_one_before_it_after_a_restart_too() -> None:
    keeping = Keeping()
    at_work(keeping).join(term=2)
    second = Life(keeping, 2, keep=True)
    (answer,) = second.ask(m.Join(RUN, 0, 1, sign(KEY, RUN, 0, 1)))
    assert isinstance(answer, m.Dismiss)


def test_a_shard_without_values_survives_without_values() -> None:
    keeping = Keeping()
    Life(keeping).join()
    second = Life(keeping, 2, keep=True)
    assert second.answer() == m.Serving("server-0", "ipc://x", initialised=False)
    second.join()
    second.initialise()
    assert second.push(0) == [(0, APPLIED)]


def test_without_keep_a_server_begins_anew_whatever_is_there() -> None:
    keeping = Keeping()
    at_work(keeping).push(0)
    second = Life(keeping, 2)
    assert second.answer() == m.Serving("server-0", "ipc://x", initialised=False)
    assert second.version == 0


# ---------------------------------------------------------------- killed in the middle


def test_a_kill_at_any_point_of_any_push_loses_and_doubles_nothing() -> None:
    """Three pushes, sent until they are acknowledged, by whatever server is there."""

    def three_pushes(kill_at: int) -> tuple[Life, int]:
        keeping = Keeping()
        life = at_work(keeping)
        keeping.point = kill = KillAt(kill_at)
        for seq in range(3):
            values = np.zeros(SIZE)
            values[seq] = -1
            try:
                life.push(seq, values)
            except Killed:
                life = Life(keeping, 2, keep=True)
                life.join()
                assert life.push(seq, values) in ([(seq, APPLIED)], [(seq, DUPLICATE)])
        return life, kill.passed

    _, points = three_pushes(0)
    assert points >= 9
    for kill_at in range(1, points + 1):
        life, _ = three_pushes(kill_at)
        assert (life.w, life.version) == ([1, 1, 1, 0], 3), kill_at


def test_what_is_acknowledged_is_committed_before() -> None:
    """Every outcome that settles a push (LATE: see the barrier), and every new term."""
    keeping = Keeping()
    life = at_work(keeping)
    for do in (
        lambda: life.push(0),
        lambda: life.push(1, (np.nan, 0, 0, 0)),
        lambda: life.join(term=2),
        lambda: life.join(slot=1),
        lambda: life.tell(m.Members((0, 1))),
    ):
        committed: list[str] = []
        keeping.point = committed.append
        do()
        assert "commit written" in committed
        kept = Life(keeping, 2, keep=True).server.serving
        assert kept is not None
        assert life.server.serving is not None
        assert kept.parameters.dedup.to_json() == life.server.serving.parameters.dedup.to_json()


# ---------------------------------------------------------------- the barrier

SYNC = registry.load("algorithms", "sync")


def barrier(keeping: Keeping, term: int = 1, *, keep: bool = False) -> Life:
    life = Life(keeping, term, keep=keep, algorithm=SYNC)
    for slot in (0, 1):
        life.join(slot)
    if not keep:
        life.initialise()
    life.tell(m.Members((0, 1)))
    return life


def test_that_a_push_was_too_late_is_committed_before_it_is_said() -> None:
    """It settles the push, too: the next server must not take it for a new one."""
    keeping = Keeping()
    life = barrier(keeping)
    for slot in (0, 1):
        life.push(0, slot=slot)
    committed: list[str] = []
    keeping.point = committed.append
    assert life.push(1, slot=0, clock=0) == [(1, LATE)]
    assert "commit written" in committed
    second = barrier(keeping, 2, keep=True)
    assert second.push(1, slot=0, clock=0) == [(1, LATE)]
    assert second.join(0).next_seq == 2


def test_a_push_that_was_held_is_new_to_the_next_server() -> None:
    keeping = Keeping()
    first = barrier(keeping)
    assert first.push(0, slot=0) == [(0, HELD)]
    second = barrier(keeping, 2, keep=True)
    assert second.push(0, slot=0) == [(0, HELD)]
    assert second.push(0, slot=1) == [(0, HELD), (0, APPLIED), (0, APPLIED)]
    assert (second.w, second.version) == ([1, 0, 0, 0], 1)


def test_a_step_that_was_made_is_not_made_again() -> None:
    keeping = Keeping()
    first = barrier(keeping)
    first.push(0, slot=0)
    first.push(0, slot=1)
    second = barrier(keeping, 2, keep=True)
    assert second.push(0, slot=0) == [(0, DUPLICATE)]
    assert second.push(1, slot=0, clock=1) == [(1, HELD)]
    assert second.push(1, slot=1, clock=1) == [(1, HELD), (1, APPLIED), (1, APPLIED)]
    assert second.version == 2


def test_the_next_server_waits_for_all_members_although_nobody_joins_anew() -> None:
    keeping = Keeping()
    first = barrier(keeping)
    for slot in (0, 1):
        first.push(0, slot=slot)
    second = Life(keeping, 2, keep=True, algorithm=SYNC)
    second.join(0)
    assert second.push(1, slot=0, clock=1) == [(1, HELD)]
    second.tell(m.Members((0, 1)))
    assert second.version == 1, "it waits for worker-1"
    second.join(1)
    assert (1, APPLIED) in second.push(1, slot=1, clock=1)


def test_a_server_that_died_before_it_knew_the_members_left_them_all_to_be_waited_for() -> None:
    keeping = Keeping()
    first = Life(keeping, algorithm=SYNC)
    first.join(0)
    first.initialise()
    second = Life(keeping, 2, keep=True, algorithm=SYNC)
    for slot in (0, 1):
        second.join(slot)
    second.tell(m.Members((0, 1)))
    assert second.push(0, slot=0) == [(0, HELD)]
    assert (0, APPLIED) in second.push(0, slot=1)


def test_one_who_had_not_pushed_yet_is_still_not_waited_for() -> None:
    keeping = Keeping()
    first = barrier(keeping)
    for slot in (0, 1):
        first.push(0, slot=slot)
    first.join(1, term=2)
    second = Life(keeping, 2, keep=True, algorithm=SYNC)
    second.join(0)
    second.join(1, term=2)
    second.tell(m.Members((0, 1)))
    assert second.push(1, slot=0, clock=1) == [(1, HELD), (1, APPLIED)]
    assert second.push(0, slot=1, term=2, clock=1) == [(0, LATE)]
    assert second.push(2, slot=0, clock=2) == [(2, HELD)], "now worker-1 counts"


def test_a_kill_at_any_point_of_a_barrier_makes_every_step_once() -> None:
    def two_steps(kill_at: int) -> tuple[Life, int]:
        keeping = Keeping()
        life = barrier(keeping)
        keeping.point = kill = KillAt(kill_at)
        for clock in (0, 1):
            for slot in (0, 1):
                try:
                    life.push(clock, slot=slot, clock=clock)
                except Killed:
                    life = barrier(keeping, 2, keep=True)
                    for sent_slot in range(slot + 1):
                        life.push(clock, slot=sent_slot, clock=clock)
        return life, kill.passed

    _, points = two_steps(0)
    for kill_at in range(1, points + 1):
        life, _ = two_steps(kill_at)
        assert (life.w, life.version) == ([2, 0, 0, 0], 2), kill_at


# ---------------------------------------------------------------- poison


def reasons(life: Life, values: Any, seq: int) -> tuple[m.Ack, list[str]]:
    delta = Packed("none", SIZE, (np.array(values, np.float32),))
    message = m.Push(1, 1, 1, seq, 0, 7, 9, 3, 0, delta)
    effects = life.tell(message, b"worker")
    (ack,) = [e.message for e in effects if isinstance(e, Send)]
    return ack, [e.text for e in effects if isinstance(e, Note)]


def test_poison_is_refused_with_whose_it_is_and_of_which_steps() -> None:
    life = at_work(Keeping())
    life.join(1)
    ack, notes = reasons(life, (np.nan, 0, 0, 0), 0)
    assert ack.outcome == REFUSED
    assert ack.reason == (
        "refused a push of worker-1 (term 1, number 0, steps 7..9): "
        "it holds values that are not finite, or its norm is not"
    )
    assert notes == [ack.reason]
    ack, _ = reasons(life, (2e9, 0, 0, 0), 1)
    assert "2e+09, above servers.push_norm_max = 1e+09" in ack.reason
    assert life.w == [0, 0, 0, 0]
    assert life.push(0, slot=0) == [(0, APPLIED)]


def test_poison_is_counted_by_worker_also_over_a_restart() -> None:
    keeping = Keeping()
    life = at_work(keeping)
    life.join(1)
    assert life.server.serving is not None
    assert "poison" not in life.server.serving.metrics(0.0)
    for seq in range(3):
        life.push(seq, (np.inf, 0, 0, 0), slot=1)
    assert life.server.serving.metrics(0.0)["poison"] == {"worker-1": 3}
    second = Life(keeping, 2, keep=True)
    second.join(1)
    assert second.push(2, slot=1) == [(2, REFUSED)], "told again, and not that it was applied"
    second.push(3, (np.inf, 0, 0, 0), slot=1)
    assert second.server.serving is not None
    assert second.server.serving.metrics(0.0)["poison"] == {"worker-1": 4}


@pytest.mark.parametrize("waits", [False, True], ids=["downpour", "barrier"])
def test_an_update_that_comes_to_infinity_ends_the_server_before_anybody_hears_of_it(
    waits: bool,
) -> None:
    """Its pushes are sound: it is the rate that is not. Another process would do no better."""
    keeping = Keeping()
    life = barrier(keeping) if waits else at_work(keeping)
    life.tell(m.ChangeSettings(1, {"lr": 1e32}))
    if waits:
        assert life.push(0, slot=1, clock=0) == [(0, HELD)]
    life.effects = life.tell(life.message(0, (1e8, 0, 0, 0)), b"worker")
    failure = failed(life)
    assert (failure.name, failure.fatal) == ("server-0", True)
    assert failure.error == (
        'an update would have made "w" infinite or NaN, and was discarded; '
        "a smaller lr or weight_decay may help"
    )
    assert [e for e in life.effects if isinstance(e, Send) and e.peer != COORDINATOR] == []
    second = barrier(keeping, 2, keep=True) if waits else Life(keeping, 2, keep=True)
    assert (second.w, second.version) == ([0, 0, 0, 0], 0)
    assert second.join().next_seq == 0


# ---------------------------------------------------------------- ends


def failed(life: Life) -> m.Failed:
    (exit_,) = [e for e in life.effects if isinstance(e, Exit)]
    assert exit_.code == 1
    failure = life.answer()
    assert isinstance(failure, m.Failed)
    return failure


def test_a_state_that_is_missing_fails_the_server_for_good_with_the_reason() -> None:
    failure = failed(Life(Keeping(), 2, keep=True))
    assert (failure.error, failure.detail, failure.fatal) == (
        "there is none; go back", "shard-0.state", True,
    )  # fmt: skip


def test_a_state_that_another_process_has_open_may_be_tried_again() -> None:
    class Locked(Keeping):
        def reopen(self, spec: Spec) -> Storage:
            raise StateHeld("pid 4711 has it")

    assert not failed(Life(Locked(), 2, keep=True)).fatal


@pytest.mark.parametrize("keep_state", [False, True])
def test_the_end_of_a_run_removes_the_state_unless_it_may_be_recovered(keep_state: bool) -> None:
    keeping = Keeping()
    life = at_work(keeping)
    life.push(0)
    effects = life.tell(m.Shutdown("over", keep_state))
    assert isinstance(effects[-1], Exit)
    assert bool(keeping.buffer) == keep_state
    if keep_state:
        for page in (1, 2):  # "w" of both buffers
            keeping.buffer[-4096 * page] ^= 1
        assert "vectors" in failed(Life(keeping, 2, keep=True)).error


def test_a_server_that_is_told_to_stop_leaves_its_state() -> None:
    keeping = Keeping()
    life = at_work(keeping)
    life.push(0)
    life.server.handle(StopRequested("SIGTERM"), 0.0)
    assert Life(keeping, 2, keep=True).w == [1, 0, 0, 0]
