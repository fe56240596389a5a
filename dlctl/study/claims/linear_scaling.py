"""k times the batch with k times the rate trains as one batch does, until it breaks."""

from __future__ import annotations

from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, changes_of, finals, less, within

EPOCHS = 6
BATCH = 32
SIZES = (1, 4, 12, 32)
ALIKE = 0.02
TRIALS = 3
WARMUP = "20%"


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(stop=f"epochs = {EPOCHS}.0", workers=1, batch=BATCH, portion=1)
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    begun = Arm(
        method="sync",
        changes={"optimizer": {"name": "sgd", "lr": 0.03}},
        conditions={"step_s": 0.01},
    )
    rate = lab.tuned({"1": begun}, "accuracy >= 0.999", TRIALS)["1"].changes["optimizer.lr"]
    arms = {}
    for k in SIZES:
        scaled = {"workers.count": k, "optimizer": {"name": "sgd", "lr": k * rate}}
        warm = {"schedule": {"kind": "constant", "warmup": WARMUP}} if k > 1 else {}
        arms[f"k = {k}"] = begun.having({**scaled, **warm})
    plain = {"workers.count": 12, "optimizer": {"name": "sgd", "lr": rate}}
    arms["k = 12, rate not scaled"] = begun.having(plain)
    runs = lab.run(arms)
    accuracy = {name: finals(of_arm, "accuracy", 0.0) for name, of_arm in runs.items()}
    one = accuracy["k = 1"]
    return Evidence(
        margins={
            "as one batch": within(less(accuracy["k = 4"], one), ALIKE),
            "scaling is needed": less(accuracy["k = 12, rate not scaled"], accuracy["k = 12"]),
            "it breaks": within(less(one, accuracy["k = 32"]), -ALIKE),
        },
        figures={f"accuracy after {EPOCHS} epochs": accuracy},
        notes=changes_of({"k = 1": begun.having({"optimizer.lr": rate})}, ["optimizer.lr"]),
    )


CLAIM = PaperClaim(
    paper="Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017",
    sentence="With k workers, k times the rate and a gradual warm-up, training is as good per "
    "epoch as with one; for very large batches this breaks.",
    setup=f"sync on the digits, one hidden layer, {EPOCHS} epochs, k workers with batches of "
    f"{BATCH}. The rate for k = 1 is tuned with {TRIALS} trials; for k workers it is k times that, "
    f"reached gradually in {WARMUP} of the run.",
    measure="the accuracy at the end",
    criterion={
        "as one batch": f"with k = 4 it is at most {ALIKE:g} lower than with k = 1",
        "scaling is needed": "with k = 12 it is higher with the scaled rate than without",
        "it breaks": f"with k = 32 it is more than {ALIKE:g} lower than with k = 1",
    },
    experiment=experiment,
    minutes=1,
)
