"""gensim's word2vec on the words of `task.py` in this directory: prints its loss, seconds, words.

It has the example's sentences, rates and rules, but its own sigmoid table and random generator.
"""

from __future__ import annotations

import json
import random
import sys
import time

import torch
from gensim.models import Word2Vec  # type: ignore[import-untyped]

WORKERS = 2
RATE, FINAL = 0.025, 0.0001


def main() -> None:
    epochs = int(sys.argv[1])
    sys.path.insert(0, ".")
    import task as example  # type: ignore[import-not-found]

    words = example.vocabulary()[0]
    sentences = [[words[number] for number in each] for each in example.sentences()]
    random.Random(1).shuffle(sentences)  # dlctl shuffles, gensim does not.
    model = Word2Vec(
        vector_size=example.WIDTH, window=example.WINDOW, negative=example.NEGATIVES,
        sample=example.SAMPLE, min_count=1, sg=1, workers=WORKERS, seed=1, alpha=RATE,
        min_alpha=RATE * FINAL,
    )  # fmt: skip
    model.build_vocab(sentences)
    began = time.perf_counter()
    model.train(sentences, total_examples=len(sentences), epochs=epochs)
    took_s = time.perf_counter() - began
    order = [model.wv.key_to_index[word] for word in words]
    found = {"input": model.wv.vectors[order], "output": model.syn1neg[order]}
    tables = {name: torch.from_numpy(values) for name, values in found.items()}
    metrics = example.task.evaluate(None, lambda name, rows: tables[name][rows])
    trained = epochs * sum(map(len, sentences))
    print(json.dumps({"loss": metrics["loss_of_pair"], "seconds": took_s, "words": trained}))


main()
