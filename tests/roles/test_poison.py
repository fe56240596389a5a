"""Pushes that were refused in a row, as a worker counts them."""

from __future__ import annotations

from dlctl.roles.poison import Poison


def refuse(poison: Poison, number: int) -> None:
    poison.refused(number, "its norm is too large", number, number)


def test_a_push_that_one_shard_has_taken_and_another_one_refused_is_refused() -> None:
    poison = Poison()
    for number in range(5, 8):
        refuse(poison, number)
        poison.settled(number)
    assert (poison.pushes, poison.pushes_in_row) == (3, 3)


def test_a_push_is_counted_once_however_many_shards_refuse_it_and_in_whatever_order() -> None:
    poison = Poison()
    for number in (5, 6, 5, 6, 4):
        refuse(poison, number)
    assert (poison.pushes, poison.pushes_in_row) == (3, 3)


def test_a_push_that_all_shards_have_taken_ends_the_row() -> None:
    poison = Poison()
    refuse(poison, 5)
    poison.settled(5)
    poison.settled(6)
    assert (poison.pushes, poison.pushes_in_row) == (1, 0)
    refuse(poison, 7)
    assert (poison.pushes, poison.pushes_in_row) == (2, 1)


def test_an_older_push_that_is_settled_late_does_not_end_the_row() -> None:
    poison = Poison()
    refuse(poison, 6)
    poison.settled(5)
    assert poison.pushes_in_row == 1
