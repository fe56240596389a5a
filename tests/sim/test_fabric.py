"""Network cards of simulated machines are shared fairly."""

from __future__ import annotations

import pytest

from dlctl.sim.fabric import SMALL_BYTES, CardQueues, Fabric
from dlctl.sim.timeline import Timeline

RATE = 1e6
MB = 1_000_000


def sent_at(
    *messages: tuple[float, str, str, str, int],
    rates: dict[str, float] | None = None,
    is_duplex: bool = True,
) -> list[float]:
    """(when, flow, source, target, bytes) of each message -> when its last byte is sent."""
    timeline = Timeline()
    fabric = Fabric(timeline, RATE, rates, is_duplex=is_duplex)
    found = [0.0] * len(messages)

    def send(number: int) -> None:
        _, flow, source, target, nbytes = messages[number]

        def sent() -> None:
            found[number] = timeline.now

        fabric.send(flow, source, target, nbytes, sent)

    for number, message in enumerate(messages):
        timeline.at(message[0], lambda number=number: send(number))
    while timeline.step(1e9):
        pass
    return found


def test_one_message_has_the_whole_card() -> None:
    assert sent_at((1.0, "f", "a", "b", MB)) == pytest.approx([2.0])


def test_messages_to_one_machine_share_its_card() -> None:
    workers = [(0.0, f"w{n}", f"w{n}", "server", MB) for n in range(4)]
    assert sent_at(*workers) == pytest.approx([4.0] * 4)


def test_both_directions_are_separate() -> None:
    assert sent_at((0.0, "f", "a", "b", MB), (0.0, "g", "b", "a", MB)) == pytest.approx([1.0, 1.0])


def test_both_directions_may_share_one_rate() -> None:
    both = ((0.0, "f", "a", "b", MB), (0.0, "g", "b", "a", MB))
    assert sent_at(*both, is_duplex=False) == pytest.approx([2.0, 2.0])


def test_a_card_may_have_a_rate_of_its_own() -> None:
    both = ((0.0, "f", "a", "b", MB), (0.0, "g", "a", "c", MB))
    assert sent_at(*both, rates={"b": RATE / 4}) == pytest.approx([4.0, 4 / 3])
    small = (0.0, "f", "a", "b", 1000)
    assert sent_at(small, rates={"b": RATE / 4}) == pytest.approx([0.004])


def test_who_leaves_gives_its_share_to_the_others() -> None:
    # Until 1 s both have half; then the second one has all.
    first, second = sent_at((0.0, "f", "a", "c", MB // 2), (0.0, "g", "b", "c", MB))
    assert first == pytest.approx(1.0)
    assert second == pytest.approx(1.5)


def test_what_one_flow_cannot_use_goes_to_others() -> None:
    # a sends to x and y, b and c send to x as well: x's card gives each a third, so that a's other
    # flow has two thirds of a's card.
    to_x = [(0.0, name, name, "x", 2 * MB) for name in ("a", "b", "c")]
    (to_y,) = sent_at(*to_x, (0.0, "a to y", "a", "y", MB))[3:]
    assert to_y == pytest.approx(1.5)


def test_messages_of_a_flow_keep_their_order() -> None:
    sizes = [SMALL_BYTES, 1, MB, 1, 1]
    found = sent_at(*((0.0, "f", "a", "b", nbytes) for nbytes in sizes))
    assert found == sorted(found)


def test_a_queueing_card_is_busy_with_what_it_has_carried_and_not_with_what_waits() -> None:
    timeline = Timeline()
    cards, sent = CardQueues(timeline, RATE), []
    for name in ("a", "b"):
        cards.send(name, "server", name, 4 * MB, lambda: sent.append(timeline.now))
    timeline.at(5.0, lambda: None)
    while timeline.step(5.0):
        pass
    assert sent == pytest.approx([4.0])
    busy_s = cards.busy_s()
    assert busy_s["server", "out"] == pytest.approx(5.0)
    assert (busy_s["a", "in"], busy_s["b", "in"]) == pytest.approx((4.0, 1.0))


def test_a_small_message_waits_for_those_of_its_flow_alone() -> None:
    timeline = Timeline()
    cards, sent = CardQueues(timeline, RATE), {}

    def send(flow: str, nbytes: int) -> None:
        name = f"{flow} {nbytes}"
        cards.send(flow, "server", flow, nbytes, lambda: sent.setdefault(name, timeline.now))

    send("worker", 4 * MB)
    send("worker", 1000)
    send("coordinator", 1000)
    while timeline.step(1e9):
        pass
    assert sent == pytest.approx(
        {"worker 4000000": 4.0, "worker 1000": 4.0, "coordinator 1000": 1e-3}
    )
    assert cards.busy_s()["server", "out"] == pytest.approx(4.002)
