"""What is leased to a loop of the user's own, and how its loader cuts it."""

from __future__ import annotations

from dlctl.roles.protocol.loop_effects import GiveData, PortionPart
from dlctl.roles.worker.stock import Stock
from dlctl.wire.messages import Lease


def stock_of(*sizes: int) -> Stock:
    """Portions of these sizes, one behind the other in data epoch 0."""
    stock, start = Stock(), 0
    for number, size in enumerate(sizes):
        stock.give(GiveData(Lease(0, number, 0, start, start + size)))
        start += size
    return stock


def test_a_batch_may_span_portions():
    stock = stock_of(5, 2, 9)
    assert stock.take(4) == (PortionPart(0, 0, 0, 4),)
    assert stock.take(4) == (
        PortionPart(0, 0, 4, 5),
        PortionPart(0, 1, 5, 7),
        PortionPart(0, 2, 7, 8),
    )
    assert stock.take(20) == (PortionPart(0, 2, 8, 16),)
    assert stock.take(1) == ()


def test_what_is_taken_and_not_delivered_is_taken_again():
    stock = stock_of(6, 6)
    first, _, _ = stock.take(4), stock.take(4), stock.take(4)
    stock.deliver(first)
    assert (stock.undelivered(), stock.untaken()) == (8, 0)
    stock.take_back()
    assert stock.take(4) == (PortionPart(0, 0, 4, 6), PortionPart(0, 1, 6, 8))


def test_less_than_a_batch_is_one_only_where_no_more_comes():
    stock = stock_of(6)
    stock.deliver(stock.take(4))
    assert not stock.has_batch(4)
    stock.give(GiveData(None))
    assert stock.has_batch(4)
    stock.give(GiveData(Lease(0, 1, 0, 6, 7)))
    assert not stock.has_batch(4), "more has come, so yet more may"


def test_at_the_end_only_the_portion_that_is_begun_is_finished():
    stock = stock_of(6, 6, 6)
    stock.deliver(stock.take(4))
    on_way = stock.take(4)
    stock.give(GiveData(None, ends=True))
    assert stock.untaken() == 0, "more than the rest is on its way"
    stock.deliver(on_way)  # By a loader that cannot drop it; so another portion is begun.
    assert stock.take(9) == (PortionPart(0, 1, 8, 12),)


def test_at_the_end_a_batch_ends_where_its_portion_does():
    stock = stock_of(6, 6)
    stock.deliver(stock.take(4))
    stock.give(GiveData(None, ends=True))
    assert stock.take(4) == (PortionPart(0, 0, 4, 6),)


def test_between_portions_nothing_is_left_at_the_end():
    stock = stock_of(6, 6)
    stock.deliver(stock.take(6))
    stock.give(GiveData(None, ends=True))
    assert stock.undelivered() == 0
    assert not stock.has_batch(1)


def test_it_asks_once_until_data_comes():
    stock = stock_of(8)
    assert not stock.asks_below(8)
    stock.take(1)
    assert stock.asks_below(8)
    assert not stock.asks_below(8)
    stock.give(GiveData(Lease(0, 1, 0, 8, 9)))
    stock.take(3)
    assert stock.asks_below(8)
