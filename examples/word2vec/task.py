"""word2vec, skip-gram with negative sampling, on the words of the standard library's source text.

    dlctl run job.toml
    dlctl checkpoint export -j job.toml -o word2vec.safetensors
    python task.py word2vec.safetensors socket      # the loss, and its neighbours

Nothing is downloaded. The rules are those of word2vec.c (Mikolov et al. 2013): frequent words are
left out at random, windows shrink at random, negatives are drawn by their frequency to the power of
0.75, and each pair has a step of its own along its gradient. What differs: the pairs of one
sentence are computed at once, from the same vectors, and sigmoids are exact. Its two tables are on
the servers; a worker has those of their rows that its next sentences need.
"""

import sys
from functools import cache

import numpy as np
import torch
from torch.nn import functional
from words import nearest, sentences, vocabulary

WIDTH, WINDOW, NEGATIVES = 100, 5, 5
SAMPLE = 1e-3
"""The frequency above which words are left out at random."""
PART = 20_000
"""Pairs that are evaluated at once."""
SHOWN = ("socket", "thread", "import", "http")


class Word2Vec:
    def tables(self):
        words = len(vocabulary()[0])
        return {
            "input": (words, WIDTH, ("uniform", -0.5 / WIDTH, 0.5 / WIDTH)),
            "output": (words, WIDTH, 0.0),
        }

    def dataset(self):
        return sentences()

    def collate(self, samples):
        return pairs(samples)

    def rows(self, batch):
        inputs, targets, _ = batch
        return {"input": inputs, "output": targets}

    def loss(self, model, batch, rows):
        """Of a sentence: the sum over its pairs, each of which has a step of its own so."""
        _, targets, samples = batch
        loss = loss_of(rows["input"], rows["output"], targets)
        return loss / samples, {"pair_loss": float(loss.detach()) / max(len(targets), 1)}

    def evaluate(self, model, rows):
        """The loss of the same pairs each time; `rows` fetches what they need."""
        words, targets = fixed_pairs()
        parts = zip(words.split(PART), targets.split(PART), strict=True)
        losses = [loss_of(rows("input", w), rows("output", t), t) for w, t in parts]
        return {"loss_of_pair": float(sum(losses)) / len(words)}

    def finish(self, model, metrics, rows):
        """Once, when a run has finished: `dlctl run` shows what it returns."""
        vectors = rows("input", torch.arange(len(vocabulary()[0])))
        words = [f"{word}: {', '.join(nearest(vectors, word))}" for word in SHOWN]
        return "\n".join(["Words that are nearest to others:", *words])


def loss_of(inputs, outputs, targets):
    """The sum over all pairs of -log s(v w) - sum of log s(-v w_n) over their negatives n; s is the
    sigmoid. A negative that is the target itself does not count.

    inputs: float32[pairs, WIDTH]; outputs: float32[pairs, 1 + NEGATIVES, WIDTH], the target's
    first; targets: their words, int64[pairs, 1 + NEGATIVES].
    """
    scores = (outputs * inputs[:, None]).sum(-1)
    signs = torch.full_like(scores, -1.0)
    signs[:, 0] = 1.0
    counts = targets != targets[:, :1]
    counts[:, 0] = True
    return -(functional.logsigmoid(signs * scores) * counts).sum()


# ---------------------------------------------------------------- pairs


def pairs(samples):
    """(words int64[pairs], targets int64[pairs, 1 + NEGATIVES], how many sentences): of each word
    that is kept, all those in its window, with the word itself as their target.
    """
    words = np.concatenate(samples)
    of = np.repeat(np.arange(len(samples)), [len(each) for each in samples])
    kept = np.random.random(len(words)) < chances()[0][words]
    words, of = words[kept], of[kept]
    reach = np.random.randint(1, WINDOW + 1, len(words))
    inputs, centers = [], []
    for off in range(1, WINDOW + 1):
        near = of[off:] == of[:-off]
        before, after = near & (reach[off:] >= off), near & (reach[:-off] >= off)
        inputs += [words[:-off][before], words[off:][after]]
        centers += [words[off:][before], words[:-off][after]]
    inputs, centers = np.concatenate(inputs), np.concatenate(centers)
    table = chances()[1]
    drawn = table[np.random.randint(0, len(table), (len(centers), NEGATIVES))]
    targets = np.concatenate([centers[:, None], drawn], axis=1)
    return torch.from_numpy(inputs), torch.from_numpy(targets), len(samples)


@cache
def chances():
    """(of each word, that it is kept; a table to draw negatives from)."""
    counts = np.array(vocabulary()[1], np.float64)
    limit = SAMPLE * counts.sum()
    kept = (np.sqrt(counts / limit) + 1) * limit / counts
    shares = counts**0.75 / (counts**0.75).sum()
    table = np.repeat(np.arange(len(counts)), np.ceil(shares * 1_000_000).astype(np.int64))
    return kept, table


# ---------------------------------------------------------------- what came of it


@cache
def fixed_pairs():
    """Of every tenth sentence, always the same ones."""
    state = np.random.get_state()
    np.random.seed(0)
    words, targets, _ = pairs(sentences()[::10])
    np.random.set_state(state)
    return words, targets


task = Word2Vec()

if __name__ == "__main__":
    from safetensors.torch import load_file

    trained = load_file(sys.argv[1])
    metrics = task.evaluate(None, lambda name, rows: trained[name][rows])
    print(f"loss of a pair: {metrics['loss_of_pair']:.4f}")
    for word in sys.argv[2:] or SHOWN:
        print(f"{word}: {', '.join(nearest(trained['input'], word))}")
