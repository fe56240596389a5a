"""A kept state that is not the right one, or not whole, is never used; the reason is said."""

import re

import numpy as np
import pytest
from kept_states import adagrad, created, dense, reopened, snapshot, sparse, spec_of

from dlctl.shards import image
from dlctl.shards.base import Extras
from dlctl.shards.errors import Unusable
from dlctl.shards.image import ImageForm
from dlctl.shards.mapped import Mapped

SIZE = 64
SPEC = spec_of(adagrad(), SIZE, averaged=2)
FORM = ImageForm.of(SPEC, "the present boot")


def after(*deltas, close=False):
    """A state with one commit for each delta."""
    buffer, shard = created(adagrad(), SPEC)
    shard.storage.fill({}, Extras(np.ones(2)))
    shard.commit({"commits": 0})
    for number, delta in enumerate(deltas, 1):
        shard.apply(delta)
        shard.commit({"commits": number})
    if close:
        shard.storage.close()
    return buffer


def reason(buffer, spec=SPEC, boot_id="the present boot"):
    with pytest.raises(Unusable) as caught:
        Mapped.reopen(buffer, spec, boot_id)
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run_id": "run-2"}, "it is of run run-1, not of run-2"),
        ({"shard": 1}, "it has shard 0, this server has 1"),
        ({"lo": 11}, "it has lo 10, this server has 11"),
        ({"hi": 75}, "it has hi 74, this server has 75"),
        ({"slots": {"mean": 0.0}}, "it has slots ['sum'], this server has ['mean']"),
        ({"averaged": 3}, "it has averaged 2, this server has 3"),
        ({"workers": 500}, "it has commit bytes 20480, this server has 49152"),
    ],
)
def test_the_state_of_something_else_is_refused_by_name(changes, expected):
    values = {"averaged": 2} | changes
    assert reason(after(), spec_of(adagrad(), SIZE, **values)) == expected


def test_a_state_of_before_a_reboot_is_refused():
    assert reason(after(), boot_id="another boot").startswith("it is of before")


def test_a_state_of_another_format_is_refused(monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(image, "FORMAT", 2)
        buffer = after()
    assert re.findall(r"\d+", reason(buffer)) == ["2", str(image.FORMAT)]


@pytest.mark.parametrize("left_bytes", [0, 100, 4096, 10_000, FORM.total_bytes - 1])
def test_a_file_that_was_cut_is_refused(left_bytes):
    text = reason(after()[:left_bytes])
    assert "cut" in text or "less" in text


def test_a_file_that_is_too_long_is_refused():
    assert "long" in reason(after() + b"x")


def test_something_else_and_nothing_at_all_are_no_states():
    assert "not" in reason(bytearray(b"x" * 8192))
    assert "killed" in reason(bytearray(FORM.total_bytes))


def test_every_flipped_bit_of_the_header_is_found():
    buffer = after()
    length = int.from_bytes(buffer[12:16], "little")
    for at in range(16 + length):
        buffer[at] ^= 1 << at % 8
        assert reason(buffer), at
        buffer[at] ^= 1 << at % 8
    assert reopened(buffer, adagrad(), SPEC)[1] == {"commits": 0}


def test_a_commit_that_was_written_and_is_damaged_is_not_passed_over():
    """The one before it would be older than what was acknowledged, and its elements are gone."""
    buffer = after(dense(1, SIZE), sparse(2, SIZE, 4))
    newest = image.newest_commit(buffer, FORM).number
    for at in range(image._COMMIT.size + 40):
        copy = buffer.copy()
        copy[FORM.commit_at(newest % 2) + at] ^= 1
        assert f"number {newest}," in reason(copy), at


def test_a_commit_that_was_cut_short_does_not_count():
    buffer = after(dense(1, SIZE))
    wanted = snapshot(reopened(buffer, adagrad(), SPEC)[0])
    older = image.newest_commit(buffer, FORM).number + 1
    at = FORM.commit_at(older % 2)
    buffer[at + 20 : at + 60] = bytes(40)
    shard, meta = reopened(buffer, adagrad(), SPEC)
    assert (meta, snapshot(shard)) == ({"commits": 1}, wanted)


def test_two_damaged_commits_are_too_many():
    buffer = after(dense(1, SIZE))
    image.done_mark(buffer)[:] = 1, 2
    for which in (0, 1):
        buffer[FORM.commit_at(which) + 50] ^= 1
    assert "neither" in reason(buffer)


def killed_in_an_update(count=4):
    """One commit, and a sparse update behind it that was never committed."""
    buffer, shard = created(adagrad(), SPEC)
    shard.apply(dense(1, SIZE))
    shard.commit({"commits": 1})
    before = snapshot(shard)
    shard.apply(sparse(2, SIZE, count))
    assert snapshot(shard) != before
    return buffer, before


def test_every_flipped_bit_of_an_undo_record_is_found():
    buffer, before = killed_in_an_update()
    undo = FORM.undo(buffer)
    indices, values = undo.cut(0, 4)
    for part in (undo.number, undo.marks, indices, *values):
        for at in range(part.nbytes):
            for bit in range(8):
                part.view(np.uint8)[at] ^= 1 << bit
                assert "undo" in reason(buffer.copy())
                part.view(np.uint8)[at] ^= 1 << bit
    assert snapshot(reopened(buffer, adagrad(), SPEC)[0]) == before


def test_an_undo_record_that_nobody_needs_any_more_is_not_looked_at():
    buffer = after(sparse(2, SIZE, 4))
    wanted = snapshot(reopened(buffer.copy(), adagrad(), SPEC)[0])
    FORM.undo(buffer).values[0][0] += 1
    assert snapshot(reopened(buffer, adagrad(), SPEC)[0]) == wanted


def test_an_undo_record_for_elements_that_are_not_there_is_refused():
    buffer, _ = killed_in_an_update()
    undo = FORM.undo(buffer)
    undo.indices[3] = SIZE
    undo.mark(0, 4)
    assert "beyond" in reason(buffer)


def test_a_commit_that_is_gone_although_updates_came_behind_it_is_missed():
    """Its damage would be noticed by the mark of its end, if that was not damaged as well."""
    buffer, _ = killed_in_an_update()
    newest = image.newest_commit(buffer, FORM).number
    image.done_mark(buffer)[:] = 1, 2
    buffer[FORM.commit_at(newest % 2) + 50] ^= 1
    assert f"number {newest - 1}," in reason(buffer)


def test_what_was_saved_is_put_back_before_the_seal_of_a_closed_state_is_looked_at():
    buffer, shard = created(adagrad(), SPEC)
    shard.apply(dense(1, SIZE))
    shard.commit({"commits": 1})
    shard.storage.close()
    before = snapshot(shard)
    next_one, _ = reopened(buffer, adagrad(), SPEC)
    next_one.apply(sparse(2, SIZE, 4))
    assert snapshot(reopened(buffer, adagrad(), SPEC)[0]) == before


def test_damaged_extras_are_found():
    for at in (0, 8, 15):
        buffer = after()
        buffer[FORM.extras_at + at] ^= 1
        assert "averaged" in reason(buffer)


def test_a_state_that_was_closed_in_order_is_checked_to_the_last_bit():
    buffer = after(dense(1, SIZE), close=True)
    current = image.newest_commit(buffer, FORM).current
    for name, array in FORM.vectors(buffer, current).items():
        for at in (0, SIZE - 1):
            array.view(np.uint32)[at] ^= 1
            assert "vectors" in reason(buffer), name
            array.view(np.uint32)[at] ^= 1
    shard, _ = reopened(buffer, adagrad(), SPEC)
    shard.commit({})
    FORM.vectors(buffer, current)["w"].view(np.uint32)[0] ^= 1
    reopened(buffer, adagrad(), SPEC)  # At work again, it carries no such checksum.


def test_after_a_kill_damage_of_the_vectors_is_found_if_it_made_them_infinite():
    buffer = after(dense(1, SIZE))
    current = image.newest_commit(buffer, FORM).current
    FORM.vectors(buffer, current)["sum"][3] = np.inf
    assert '"sum"' in reason(buffer)


def test_a_state_with_more_workers_than_were_planned_for_is_an_error_not_a_broken_file():
    buffer, shard = created(adagrad(), spec_of(adagrad(), SIZE))
    before = bytes(buffer)
    with pytest.raises(Exception, match="reserved"):
        shard.commit({"deliveries": [[slot, 1, 2**40] for slot in range(3000)]})
    assert bytes(buffer) == before
