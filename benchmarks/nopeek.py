"""NoPeek on the digits: what the cut tells about the scans, the test accuracy, and an attack.

The two parties of `examples/split`, with a narrower cut and all layers behind it at the lab, are
trained with `dlctl run`, for each weight of the distance correlation and each seed. Of the exported
model, with the held-out scans: u-dCor^2 of scans and cut; the accuracy; the error of a decoder that
an attacker trains on half of them and tests on the other half (`daemons/worker/split/leakage.py`);
and how well the norm of dL/dz of a sample tells its label, which the lab knows here anyway.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figures import Figure
from benchmarks.sandbox import Dlctl, sandbox

CHAPTER = "nopeek"
ALPHAS = (0.0, 0.2, 0.5, 1.0)
MODERATE = 0.2
SEEDS = 5
POINTS = 2.0
"""Of accuracy, that may be lost with the moderate weight."""
RESULTS = Path(__file__).parent / "results" / "nopeek.json"
EXAMPLE = Path(__file__).parents[1] / "examples" / "split"
LAYERS = (
    "nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())",
    "nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))",
)
LAB = f'''"""All layers behind the cut, and the loss."""

from torch import nn
from torch.nn import functional


class Lab:
    def server_model(self):
        return {LAYERS[1]}

    def loss(self, output, labels):
        return functional.cross_entropy(output, labels)


task = Lab()
'''
JOB = """[job]
name = "nopeek"
seed = {seed}
stop = {{ epochs = {epochs} }}
[algorithm]
name = "split"
alpha = {alpha}
[optimizer]
name = "momentum"
lr = 0.05
[workers]
batch_size = 64
threads = 1
[checkpoints]
every_s = 0.0
[evaluation]
every_epochs = 0.0
[[parties]]
name = "clinic"
role = "client"
task = "clinic/train.py:task"
host = "local"
[[parties]]
name = "lab"
role = "head"
task = "lab/train.py:task"
host = "local"
"""


class Leakage(NamedTuple):
    u_dcor2: float
    accuracy: float
    error: float
    """Of the attacker's decoder."""
    error_of_mean: float
    """Of an attacker who sees nothing."""
    label_auc: float


def measure(*, quick: bool) -> list[Figure]:
    found: dict[float, list[Leakage]] = {}
    for alpha in (*ALPHAS[:1], MODERATE) if quick else ALPHAS:
        found[alpha] = [_run(alpha, seed, quick) for seed in range(1 if quick else SEEDS)]
        means = np.mean(found[alpha], axis=0).round(4).tolist()
        print(f"  alpha {alpha:g}: {means}", file=sys.stderr, flush=True)
    if not quick:
        rows: dict[str, Any] = {f"{a:g}": [r._asdict() for r in of] for a, of in found.items()}
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    return _figures(found, judges=not quick)


def _figures(found: dict[float, list[Leakage]], *, judges: bool) -> list[Figure]:
    plain, figures = found[0.0], []
    for alpha, of in found.items():
        at = f"alpha {alpha:g}"
        figures.append(Figure(CHAPTER, f"{at}: u-dCor^2", "", tuple(r.u_dcor2 for r in of)))
        told = f"to alpha 0: {np.median([r.accuracy for r in of]):.3f}"
        if alpha:
            lost = tuple(
                100 * (before.accuracy - r.accuracy) for before, r in zip(plain, of, strict=True)
            )
            asked = POINTS if judges and alpha == MODERATE else None
            what = f"{at}: accuracy lost"
            figures.append(Figure(CHAPTER, what, "points", lost, asked, told))
        figures.append(
            Figure(
                CHAPTER, f"{at}: attacker's error, of that without z", "x",
                tuple(r.error / r.error_of_mean for r in of),
            )
        )  # fmt: skip
        figures.append(Figure(CHAPTER, f"{at}: AUC of |dL/dz|", "", tuple(r.label_auc for r in of)))
    for less, more in zip(found, [*found][1:], strict=False):
        what = f"alpha {more:g} to {less:g}: "
        asked = 1.0 if judges else None
        pairs = [*zip(found[more], found[less], strict=True)]
        leaks = tuple(b.u_dcor2 / a.u_dcor2 for b, a in pairs)
        figures.append(Figure(CHAPTER, f"{what}u-dCor^2", "x", leaks, asked))
        errors = tuple(a.error / b.error for b, a in pairs)
        figures.append(Figure(CHAPTER, f"{what}1 / attacker's error", "x", errors, asked))
    return figures


def _run(alpha: float, seed: int, quick: bool) -> Leakage:
    with sandbox() as directory:
        for party in ("clinic", "lab"):
            shutil.copytree(EXAMPLE / party, directory / party)
        (directory / "lab" / "train.py").write_text(LAB)
        clinic = directory / "clinic" / "train.py"
        mine = "nn.Sequential(nn.Linear(64, 128), nn.ReLU())"
        assert mine in clinic.read_text(), "the example has changed"
        clinic.write_text(clinic.read_text().replace(mine, LAYERS[0]))
        file, exported = directory / "job.toml", directory / "model.pt"
        file.write_text(JOB.format(alpha=alpha, seed=seed, epochs=1 if quick else 15))
        dlctl = Dlctl()
        dlctl("run", "--fresh", "-q", str(file))
        dlctl("checkpoint", "export", "-j", str(file), "-o", str(exported))
        return _judged(exported, directory / "clinic" / "digits.npz", seed)


def _judged(exported: Path, data: Path, seed: int) -> Leakage:
    import torch
    from torch import nn
    from torch.nn import functional

    from daemons.worker.split import dcor, leakage

    torch.set_num_threads(1)
    client, head = (eval(layers, {"nn": nn}) for layers in LAYERS)
    state = torch.load(exported, weights_only=True)
    for prefix, part in (("client.", client), ("head.", head)):
        mine = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        part.load_state_dict(mine)
    with np.load(data) as file:
        images = torch.tensor(file["pixels"]).float() / 8
        labels = torch.tensor(file["labels"]).long()
    images -= images[:-360].mean(0)
    x, y = images[-360:], labels[-360:]
    z = client(x).detach().requires_grad_()
    output = head(z)
    (slopes,) = torch.autograd.grad(functional.cross_entropy(output, y, reduction="sum"), [z])
    z = z.detach()
    return Leakage(
        float(dcor.u_dcor2(x, z)),
        float((output.argmax(1) == y).float().mean()),
        leakage.reconstruction_error(z[:180], x[:180], z[180:], x[180:], seed=seed),
        leakage.error_of_mean(images[:-360], x[180:]),
        leakage.label_auc(slopes, y),
    )
