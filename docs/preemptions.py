"""Writes preemptions.md and its figure from benchmarks/results/preemptions.json:
`make preemptions`, or `python docs/preemptions.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import figures
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PAGE = HERE / "preemptions.md"
RECORD = HERE.parent / "benchmarks" / "results" / "preemptions.json"
Json = dict[str, Any]

TEXT = """<!-- Written by `make preemptions` from benchmarks/results/preemptions.json. -->

# {times} preemptions in one run

A real Slurm on {nodes} nodes. Another user's job takes {taken} of them for {away:.0f} s,
{often} times, as on the preemptible partition of a cluster. The same network is trained on as
many samples of the digits, with batches of 16 per worker, once by dlctl and once by `torchrun`
with DistributedDataParallel.

- **dlctl**: each node is a Slurm job of its own (`[launcher] jobs = "each"`, `requeue = true`),
  the method is `async-diloco`, and the servers are on the machine that starts the run.
- **torchrun**: one job of {nodes} nodes, `sbatch --requeue`, which saves a checkpoint about
  every epoch (every 4.5 s) and resumes from it.

| | {names} |
|---|---|---|
| stops: no step for 5 s | {stops} |
| longest time without a step | {longest} |
| acknowledged pushes | {acknowledged} |
| of these lost | {lost} |
| pushes applied twice | {twice} |
| samples that counted | {samples} |
| samples trained again | {again} |
| seconds | {seconds} |
| loss on held-out scans | {loss} |
| accuracy on held-out scans | {accuracy} |

![Samples and loss by time; grey: nodes are taken](preemptions.svg)

## How it was measured

- Four hosts are network namespaces of one machine with two cores, each with slurmd. So every
  batch waits for 0.2 s: the cores are not what is compared. An unbroken run of either side
  would take about {alone:.0f} s.
- That machine had other work meanwhile. Both sides import torch in each process that starts, and
  torchrun's program does so in all four at every stop: on free nodes its stops are shorter.
- Slurm lets a requeued job wait for two minutes. Both sides' jobs were allowed to begin at once
  (`scontrol update StartTime=now`), as soon as the other job had gone. With that wait each of
  torchrun's stops is two minutes longer; dlctl's other nodes train on.
- **Lost** is what `dlctl verify` finds: pushes that a worker knows to be acknowledged, and no
  shard has. What it cannot check counts as lost. **Twice** compares the updates of each shard
  with the pushes that it has records of.
- **Samples trained again** are those behind torchrun's last checkpoint at each preemption.
  dlctl leases the data of a lost worker again; of these, each sample counts once, when its
  pushes are acknowledged.
- The two sides are different methods: at as many samples their losses differ for that reason as
  well.

`make preemptions` repeats it, in 15 minutes.
"""


def main() -> None:
    figures.set_style()
    record = json.loads(RECORD.read_text())
    draw(record["sides"])
    PAGE.write_text(text(record), encoding="utf-8")


def text(record: Json) -> str:
    sides = record["sides"]
    taken = [later - earlier for side in sides for earlier, later in side["taken"]]
    rate = record["nodes"] * 16 / 0.2
    rows = {
        "names": [side["name"] for side in sides],
        "stops": [side["stops"] for side in sides],
        "longest": [f"{side['longest_s']:.1f} s" for side in sides],
        "acknowledged": [f"{side['acknowledged']:,}" if _pushes(side) else "-" for side in sides],
        "lost": [side["lost"] if _pushes(side) else "-" for side in sides],
        "twice": [side["twice"] if _pushes(side) else "-" for side in sides],
        "samples": [f"{side['samples']:,}" for side in sides],
        "again": [f"{side['again']:,}" if not _pushes(side) else "-" for side in sides],
        "seconds": [f"{side['seconds']:.0f}" for side in sides],
        "loss": [f"{side['loss']:.3f}" for side in sides],
        "accuracy": [f"{side['accuracy']:.3f}" for side in sides],
    }
    cells = {key: " | ".join(map(str, row)) for key, row in rows.items()}
    return TEXT.format(
        times=_in_words(record["times"]), often=record["times"], nodes=record["nodes"],
        taken=record["taken"],
        away=sum(taken) / len(taken), alone=sides[0]["samples"] / rate, **cells,
    )  # fmt: skip


def _pushes(side: Json) -> bool:
    return bool(side["acknowledged"])


def _in_words(count: int) -> str:
    return "Ten" if count == 10 else str(count)


def draw(sides: list[Json]) -> None:
    """docs/preemptions.svg: a row for each side, samples and loss by time."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    rows = figure.subplots(len(sides), 2, sharex=True, squeeze=False)
    for place, (side, (left, right)) in enumerate(zip(sides, rows, strict=True)):
        for axes in (left, right):
            for began, ended in side["taken"]:
                axes.axvspan(began, ended, color="0.88", linewidth=0)
            axes.spines[["top", "right"]].set_visible(False)
        times, samples = zip(*side["progress"], strict=True)
        left.plot(times, [n / 1000 for n in samples], color=f"C{place}", linewidth=1.2)
        left.set(title=side["name"], ylabel="1,000 samples")
        at, _, losses = zip(*side["losses"], strict=True)
        right.plot(at, losses, color=f"C{place}", linewidth=1.2)
        right.set(title=side["name"], ylabel="held-out loss", yscale="log")
    for axes in rows[-1]:
        axes.set_xlabel("seconds")
    figures.save("preemptions", figure, HERE)


if __name__ == "__main__":
    main()
