"""word2vec with rows that only the servers hold: its loss with several workers against one, and its
loss and words per second against gensim's.

`examples/word2vec`, five epochs of 5 MB of the standard library's source. gensim gets the same
sentences and rates; both report the loss of the same pairs at the end. Words per second are those
after the first epoch: the time of a run with one epoch is subtracted, with its start, evaluations
and end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, pushed_bytes, sandbox

CHAPTER = "word2vec"
EXAMPLE = Path(__file__).parents[1] / "examples" / "word2vec"
LOSS_ASKED, GENSIM_ASKED = 1.02, 2.5
WORKERS = 1, 2, 4
EPOCHS = 5
RUN_S_MAX = 1800.0
BESIDE = "loss of a pair, 2 workers, to gensim's", "gensim's words per second, to ours"
PEER = Path(__file__).parent / "peers" / "gensim_word2vec.py"


class Ended(NamedTuple):
    loss: float
    """Of a pair."""
    seconds: float
    words: int
    """In all epochs; 0: unknown."""
    push_bytes: int = 0


def measure(*, quick: bool) -> list[Figure]:
    epochs = 1 if quick else EPOCHS
    with sandbox() as directory:
        for name in ("task.py", "words.py"):
            shutil.copy(EXAMPLE / name, directory)
        ours = {n: _run(directory, n, epochs) for n in (WORKERS[:2] if quick else WORKERS)}
        # Subtracted below: the time of one epoch, with start and end.
        short = Ended(0.0, 0.0, 0) if quick else _run(directory, 2, 1)
        figures = [_loss(n, ours) for n in ours if n > 1]
        try:
            peer = _gensim(directory, epochs)
        except RuntimeError as error:
            return figures + [Figure(CHAPTER, n, "x", (), skipped=str(error)) for n in BESIDE]
        return figures + _beside(peer, ours[2], short, epochs, quick=quick)


def _loss(workers: int, ours: dict[int, Ended]) -> Figure:
    found, one = ours[workers], ours[1]
    detail = f"{found.loss:.3f} against {one.loss:.3f}; {found.push_bytes / 1e6:.0f} MB pushed"
    what = f"loss of a pair, {workers} workers, to 1 worker's"
    return Figure(CHAPTER, what, "x", (found.loss / one.loss,), LOSS_ASKED, detail)


def _beside(peer: Ended, ours: Ended, short: Ended, epochs: int, *, quick: bool) -> list[Figure]:
    words = peer.words if quick else peer.words * (epochs - 1) // epochs
    rate, theirs = words / (ours.seconds - short.seconds), peer.words / peer.seconds
    loss = f"{ours.loss:.3f} against {peer.loss:.3f}"
    rates = f"{theirs:,.0f} against {rate:,.0f} words/s, 2 workers each"
    return [
        Figure(CHAPTER, BESIDE[0], "x", (ours.loss / peer.loss,), detail=loss),
        Figure(CHAPTER, BESIDE[1], "x", (theirs / rate,), GENSIM_ASKED, detail=rates),
    ]


def _run(directory: Path, workers: int, epochs: int) -> Ended:
    text = (EXAMPLE / "job.toml").read_text()
    for before, after in (
        ("epochs = 5", f"epochs = {epochs}"),
        ("[workers]\ncount = 2", f"[workers]\ncount = {workers}"),
    ):
        assert before in text, before
        text = text.replace(before, after)
    file = directory / f"job-{workers}-{epochs}.toml"
    file.write_text(text)
    dlctl, began = Dlctl(limit_s=RUN_S_MAX), time.perf_counter()
    dlctl("run", "--fresh", "-q", str(file))
    took_s = time.perf_counter() - began
    status = json.loads(dlctl("status", "--json", "-j", str(file)))
    return Ended(status["evaluation"]["loss_of_pair"], took_s, 0, pushed_bytes(status))


def _gensim(directory: Path, epochs: int) -> Ended:
    """Raises RuntimeError if it is not installed, or fails."""
    if find_spec("gensim") is None:
        raise RuntimeError("gensim is not installed")
    command = [sys.executable, str(PEER), str(epochs)]
    ended = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=RUN_S_MAX
    )
    if ended.returncode:
        raise RuntimeError(f"gensim failed: {ended.stderr.splitlines()[-1]}")
    return Ended(**json.loads(ended.stdout.splitlines()[-1]))
