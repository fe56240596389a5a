"""`python -m benchmarks [CHAPTER...] [--json FILE] [--plot FILE] [--quick]`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.figures import Figure, table, to_json
from benchmarks.plot import to_svg
from tests.hosts.rootless import become_root

CHAPTERS = {
    "start": "from `dlctl start` to ready, against bare processes that import the same",
    "server_memory": "resident memory of a server that owns ten parameters",
    "replica": "a worker's peak memory and the time of its steps, against plain torch",
    "large": "GPT-2 of 124 million parameters: memory, a step, an exchange; 5 minutes, 12 GB",
    "coordinator": "the coordinator's CPU per report and per start, by the number of workers",
    "push": "a push of 10,000 parameters until its ack, against bare pyzmq",
    "attach": "a step of a loop with dlctl.attach: against the same without, and against a task",
    "selection": "the sampled threshold of topk-sampled, against torch.topk, a memcpy; on a GPU",
    "apply": "an update of 25,000,000 parameters, dense and sparse, against a memcpy",
    "cli": "--help, --version and completion, against importing click",
    "shard_durability": "the cost of durable shards, against shards in plain memory",
    "group_commit": "pushes of 16 workers to a shard on a disk, against a sync for each",
    "hosts": "`dlctl start` on three hosts over ssh, against the same on one machine",
    "encryption": "CURVE against plain TCP: raw, and training at 1 Gbit/s",
    "roundtrip": "push and fetch, against raw TCP, pyzmq, gloo, torch RPC and Ray",
    "waiting": "the time that workers are blocked on pushes and fetches at 1 Gbit/s",
    "train": "time to an accuracy on one machine: dlctl, Hogwild, DDP, RPC, Ray, DiLoCo ...",
    "train_slow": "the same with every worker behind 100 Mbit/s and 5 ms",
    "allreduce": "a step of the small GPT, and a worker's death, against DDP under torchrun",
    "kfac": "K-FAC's epochs to an accuracy, and the time of its steps, against SGD; 10 minutes",
    "hogwild": "sparse logistic regression without locks: a step, 2 workers, against bare torch",
    "nopeek": "split learning: leakage, accuracy, an attack by NoPeek's weight; 5 seeds, 8 minutes",
    "word2vec": "embeddings by rows: loss with 1, 2, 4 workers, words/s beside gensim; 20 minutes",
    "methods": "every method on digits and on a small GPT: how good, bytes, seconds; 45 minutes",
    "methods_slow": "a small GPT behind 100 Mbit/s while a worker and a server are killed",
    "topologies": "one run for each topology on the digits, with a member killed halfway",
    "decentralised": "servers beside workers, simulated: bytes per host link, steps at 100 Mbit/s",
    "matrices": "Muon, SOAP, Shampoo on servers beside AdamW: updates to a loss, time of an update",
    "cut_memory": "peak memory of each process of a replica of two, against one process",
    "target_batch": "a round with parts of the model by bandwidth, against equal parts",
    "straggler": "sandblaster with one of eight workers ten times slower, against the ideal time",
    "foretold": "three runs that nobody calibrated on, against `dlctl simulate --like`; 10 minutes",
    "advised": "`dlctl advise` against a full real comparison, on six jobs; 15 minutes",
    "quality": "the loss of a small GPT after the same samples, against one process; 45 minutes",
}


def main(arguments: list[str]) -> int:
    """Measure, print the table, write the JSON. Returns 1 if a median exceeds its target or dlctl
    failed.

    A quick run measures nothing, so no median exceeds its target; but failures count.
    """
    options = _parser().parse_args(arguments)
    become_root("benchmarks", arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # If it is set, every process may recompile all of torch, and that would be measured.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    figures: list[Figure] = []
    for chapter in options.chapters or CHAPTERS:
        print(f"{chapter}: {CHAPTERS[chapter]} ...", file=sys.stderr, flush=True)
        figures += import_module(f"benchmarks.{chapter}").measure(quick=options.quick)
    print(table(figures))
    if options.json:
        options.json.write_text(json.dumps(to_json(figures, quick=options.quick), indent=2) + "\n")
    if options.plot:
        options.plot.write_text(to_svg(figures))
    return int(any(figure.failed if options.quick else figure.is_over() for figure in figures))


def _parser() -> argparse.ArgumentParser:
    chapters = "\n".join(f"  {name:16} {text}" for name, text in CHAPTERS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measure what dlctl costs against the bare thing.\n\nchapters:\n{chapters}",
        epilog="The exit code is 1 if a median is over what was asked, or if dlctl has failed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "chapters", metavar="CHAPTER", nargs="*", type=_chapter, help="default: all of them"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write every value there")
    parser.add_argument("--plot", metavar="FILE.svg", type=Path, help="also draw the medians there")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds: to see that it works, not to measure"
    )
    return parser


def _chapter(name: str) -> str:
    if name not in CHAPTERS:
        raise argparse.ArgumentTypeError(f'no chapter "{name}"; there are {", ".join(CHAPTERS)}')
    return name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
