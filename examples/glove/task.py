"""GloVe on the words of the standard library's source text.

    dlctl run job.toml
    dlctl checkpoint export -j job.toml -o glove.safetensors
    python task.py glove.safetensors socket            # the cost, and its neighbours

The text and its words are those of the word2vec example. The rules are those of glove.c
(Pennington et al. 2014), including its AdaGrad: it starts at 1, divides before it adds the newest
square, and multiplies the squares by the rate, except those of biases. So the task computes its own
steps, and the squares are rows of two more tables. The difference: all records of a batch step at
once, from the same vectors.
"""

import sys
from functools import cache

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from words import nearest, sentences, vocabulary

WIDTH, WINDOW = 50, 5
X_MAX, ALPHA, CLIP = 100.0, 0.75, 100.0
SHOWN = ("socket", "thread", "import", "http")


class GloVe:
    def tables(self):
        words = len(vocabulary()[0])
        begin = ("uniform", -0.5 / WIDTH, 0.5 / WIDTH)
        vectors, squares = (words, WIDTH + 1, begin), (words, WIDTH + 1, 1.0)
        return {
            "word": vectors, "context": vectors,
            "word_squares": squares, "context_squares": squares,
        }  # fmt: skip

    def dataset(self):
        return TensorDataset(*records())

    def rows(self, batch):
        words, contexts, _ = batch
        return {
            "word": words, "context": contexts,
            "word_squares": words, "context_squares": contexts,
        }  # fmt: skip

    def change(self, model, batch, rows, lr):
        """The cost, and what each record adds to its rows; the last element of one is its bias."""
        word, context = rows["word"], rows["context"]
        error, weighted = errors(word, context, batch[2])
        changes = {}
        for name, other in (("word", context), ("context", word)):
            step = (weighted[:, None] * other).clamp(-CLIP, CLIP) * lr
            step[:, -1] = weighted
            changes[name] = -step / rows[f"{name}_squares"].sqrt()
            changes[f"{name}_squares"] = step**2
        return 0.5 * (weighted * error).mean(), changes

    def evaluate(self, model, rows):
        """The cost of every tenth record."""
        words, contexts, counts = (each[::10] for each in records())
        error, weighted = errors(rows("word", words), rows("context", contexts), counts)
        return {"cost_of_record": 0.5 * float((weighted * error).mean())}

    def finish(self, model, metrics, rows):
        """Once, when a run has finished: `dlctl run` shows what it returns."""
        every = torch.arange(len(vocabulary()[0]))
        vectors = (rows("word", every) + rows("context", every))[:, :-1]
        words = [f"{word}: {', '.join(nearest(vectors, word))}" for word in SHOWN]
        return "\n".join(["Words that are nearest to others:", *words])


def errors(word, context, counts):
    """(w c + b_w + b_c - log X, that times min(1, (X / x_max)^alpha)), each float32[records]."""
    products = (word[:, :-1] * context[:, :-1]).sum(1)
    error = products + word[:, -1] + context[:, -1] - counts.log()
    return error, (counts / X_MAX).pow(ALPHA).clamp(max=1.0) * error


@cache
def records():
    """(words int64[n], contexts int64[n], how often they are near each other float32[n]), where two
    words that are d words apart, d <= WINDOW, count 1 / d, in both orders.
    """
    words = np.concatenate(sentences())
    size = len(vocabulary()[0])
    keys = [words[:-d] * size + words[d:] for d in range(1, WINDOW + 1)]
    near = [np.full(len(key), 1 / d) for d, key in enumerate(keys, 1)]
    once, of = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(of, np.concatenate(near))
    both = np.concatenate([once, once % size * size + once // size])
    once, of = np.unique(both, return_inverse=True)
    counts = np.bincount(of, np.concatenate([counts, counts])).astype(np.float32)
    return tuple(map(torch.from_numpy, (once // size, once % size, counts)))


task = GloVe()

if __name__ == "__main__":
    from safetensors.torch import load_file

    trained = load_file(sys.argv[1])
    metrics = task.evaluate(None, lambda name, rows: trained[name][rows])
    print(f"cost of a record: {metrics['cost_of_record']:.4f}")
    sums = functional.normalize((trained["word"] + trained["context"])[:, :-1], dim=1)
    for each in sys.argv[2:] or SHOWN:
        print(f"{each}: {', '.join(nearest(sums, each))}")
