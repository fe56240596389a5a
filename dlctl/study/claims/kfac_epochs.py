"""K-FAC needs fewer epochs than SGD; sharing eigenvectors needs less traffic than gradients."""

from __future__ import annotations

from dlctl.study.claims import jobs
from dlctl.study.claims.base import Arm, Evidence, Lab, PaperClaim, changes_of, costs, less

WORKERS = 4
STEPS = 50
GOOD = 0.92
TARGET = f"accuracy >= {GOOD}"
TRIALS = 3


def experiment(lab: Lab) -> Evidence:
    job = jobs.digits(
        stop=f"steps = {WORKERS * STEPS}", workers=WORKERS, batch=32, evaluation="every_steps = 20"
    )
    lab.place("digits", job, {"mlp.py": jobs.MLP})
    conditions = {"step_s": 0.01}
    momentum = {"inner": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}
    factors = {
        "name": "kfac",
        "factor_steps": 5,
        "eigen_steps": 25,
        "damping": 0.03,
    }
    begun = {
        "SGD": Arm(method="allreduce", changes=momentum, conditions=conditions),
        "K-FAC": Arm(
            method="kfac", changes={**momentum, "algorithm": factors}, conditions=conditions
        ),
    }
    arms = lab.tuned(begun, TARGET, TRIALS)
    arms["K-FAC, lw"] = arms["K-FAC"].having({"algorithm": {**factors, "placement": "lw"}})
    runs = lab.run(arms)
    never = float(WORKERS * STEPS * 32)
    samples = {n: costs(of_arm, "samples", TARGET, never) for n, of_arm in runs.items()}
    sent = {
        name: [
            1e6 if run is None else run.simulated["summed_values"] / run.figures["step"]
            for run in of_arm
        ]
        for name, of_arm in runs.items()
    }
    return Evidence(
        margins={
            "fewer samples": less(samples["K-FAC"], samples["SGD"]),
            "less traffic": less(sent["K-FAC"], sent["K-FAC, lw"]),
        },
        figures={f"samples to {GOOD:.0%}": samples, "values summed per gradient": sent},
        notes=changes_of(arms, ["inner.lr"]),
    )


CLAIM = PaperClaim(
    paper="Pauloski et al., Convolutional Neural Network Training with Distributed K-FAC, 2020",
    sentence="K-FAC reaches the same accuracy in fewer epochs than SGD with momentum, and sharing "
    "eigenvectors now and then needs less traffic than preconditioned gradients in every step.",
    setup=f"allreduce and kfac with {WORKERS} workers and momentum 0.9 on the digits, batches of "
    "32, factors every 5 steps, eigenvectors every 25. The rate of each is tuned with "
    f"{TRIALS} trials; lw has that of opt.",
    measure=f"the samples to an accuracy of {GOOD:g}, and the values that replicas sum for each "
    "gradient",
    criterion={
        "fewer samples": "K-FAC needs fewer samples than SGD",
        "less traffic": "opt sums fewer values than lw",
    },
    experiment=experiment,
    remark="K-FAC has the default KL clip of 0.001 and a damping of 0.03, which were not tuned: "
    "the clip limits its steps. The benchmark of K-FAC on Fashion-MNIST has both tuned by hand.",
    minutes=1,
)
