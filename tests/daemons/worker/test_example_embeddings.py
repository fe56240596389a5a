"""The examples with rows: their pairs, records and steps are those of the C programs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = ["a", "b", "c", "a", "b", "d", "e", "a", "c", "b"] * 30


@pytest.fixture(params=["word2vec"])
def example(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """Its task, on a text of 300 words."""
    monkeypatch.syspath_prepend(EXAMPLES / request.param)
    for name in ("task", "words"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(import_module("words"), "text", lambda: TEXT)
    yield import_module("task")
    for name in ("task", "words"):
        sys.modules.pop(name, None)


of_glove = pytest.mark.parametrize("example", ["glove"], indirect=True)


def test_both_examples_have_the_same_words() -> None:
    texts = [(EXAMPLES / name / "words.py").read_text() for name in ("word2vec", "glove")]
    assert texts[0] == texts[1]


def test_pairs_are_of_words_within_a_window_of_one_sentence(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.random.seed(0)
    monkeypatch.setattr(example, "chances", lambda: (np.ones(100), np.arange(100)))
    samples = [np.arange(10, 30), np.arange(50, 52)]
    inputs, targets, count = example.pairs(samples)
    assert count == 2
    assert targets.shape == (len(inputs), 1 + example.NEGATIVES)
    apart = (inputs - targets[:, 0]).abs()
    assert apart.min() == 1
    assert apart.max() == example.WINDOW, "they are in order in both sentences, and 20 apart"
    # All of a window, which has the same reach on both sides, and none twice.
    assert len({*zip(inputs.tolist(), targets[:, 0].tolist(), strict=True)}) == len(inputs)
    own = inputs[targets[:, 0] == 20]
    reach = int((own - 20).abs().max())
    assert sorted(own.tolist()) == [n for n in range(20 - reach, 21 + reach) if n != 20]


def test_frequent_words_are_left_out_and_negatives_go_by_their_frequency(
    example: ModuleType,
) -> None:
    kept, table = example.chances()
    words, counts = example.vocabulary()
    assert words[:3] == ("a", "b", "c")
    share = counts[0] / sum(counts)
    assert kept[0] == pytest.approx(math.sqrt(1e-3 / share) + 1e-3 / share)
    drawn = np.bincount(table) / len(table)
    powers = np.array(counts) ** 0.75
    assert np.allclose(drawn, powers / powers.sum(), atol=1e-4)


def test_a_negative_that_is_the_target_does_not_count(example: ModuleType) -> None:
    inputs, outputs = torch.randn(1, 100), torch.randn(1, 3, 100)
    scores = (outputs[0] @ inputs[0]).tolist()
    targets = torch.tensor([[4, 9, 4]])
    expected = math.log1p(math.exp(-scores[0])) + math.log1p(math.exp(scores[1]))
    assert float(example.loss_of(inputs, outputs, targets)) == pytest.approx(expected, rel=1e-4)


@of_glove
def test_words_count_by_the_inverse_of_their_distance_in_both_orders(example: ModuleType) -> None:
    words, contexts, counts = example.records()
    found = {(w, c): x for w, c, x in zip(*(t.tolist() for t in (words, contexts, counts)),
                                          strict=True)}  # fmt: skip
    numbers = [example.vocabulary()[0].index(word) for word in TEXT]
    expected: dict[tuple[int, int], float] = {}
    for i, one in enumerate(numbers):
        for d in range(1, example.WINDOW + 1):
            if i + d < len(numbers):
                for pair in ((one, numbers[i + d]), (numbers[i + d], one)):
                    expected[pair] = expected.get(pair, 0.0) + 1 / d
    assert found == pytest.approx(expected, rel=1e-5)


@of_glove
def test_one_record_makes_the_step_of_glove_c(example: ModuleType) -> None:
    """Number by number, with its order: divided by the squares first, which are added to then."""
    rng, size, lr, count = np.random.default_rng(0), example.WIDTH, 0.05, 30.0
    names = ("word", "context", "word_squares", "context_squares")
    rows = {name: rng.random((1, size + 1)) + ("squares" in name) for name in names}
    tensors = {name: torch.from_numpy(values) for name, values in rows.items()}
    batch = (torch.tensor([0]), torch.tensor([1]), torch.tensor([count], dtype=torch.float64))
    loss, changes = example.task.change(None, batch, tensors, lr)
    w, c, ws, cs = (rows[name][0].copy() for name in names)
    before_w, before_c = w.copy(), c.copy()
    diff = sum(w[i] * c[i] for i in range(size)) + w[size] + c[size] - math.log(count)
    fdiff = (count / 100.0) ** 0.75 * diff
    assert float(loss) == pytest.approx(0.5 * fdiff * diff)
    for i in range(size):
        temp_w = min(max(fdiff * before_c[i], -100), 100) * lr
        temp_c = min(max(fdiff * before_w[i], -100), 100) * lr
        w[i] -= temp_w / math.sqrt(ws[i])
        c[i] -= temp_c / math.sqrt(cs[i])
        ws[i] += temp_w**2
        cs[i] += temp_c**2
    w[size] -= fdiff / math.sqrt(ws[size])
    c[size] -= fdiff / math.sqrt(cs[size])
    ws[size] += fdiff**2
    cs[size] += fdiff**2
    for name, expected in zip(names, (w, c, ws, cs), strict=True):
        assert np.allclose(rows[name][0] + changes[name][0].numpy(), expected, atol=1e-12)
