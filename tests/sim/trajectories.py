"""The way of every method, as digests: `python tests/sim/trajectories.py > FILE`.

For a change that must change no result: run it before and after, on one machine, and compare the
two files. (Other processors round sums of products differently, so no file is kept here.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "toys"))
from of_torch import OfTorch
from simulated import Watcher, job_file

from dlctl import registry
from dlctl.sim.drivers import ComputeOptions
from dlctl.sim.faults import Faults
from dlctl.sim.objectives import WithBuffers
from dlctl.sim.simulation import Simulation
from dlctl.wire.messages import Push

SHORT: dict[str, Any] = {
    "local_steps": 4, "exchange_every_steps": 2, "buffer_pushes": 2, "quorum": 2, "fragments": 2,
    "warmup_density": [], "clock_steps": 2, "target_samples": 24,
}  # fmt: skip
"""For every method with such a key."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "in step": {"overlap": False},
    "backups": {"backup_workers": 1},
    "symmetric": {"mode": "symmetric"},
    "pull": {"mode": "pull"},
    "powersgd": {"hook": "powersgd", "powersgd_after_steps": 6},
    "post-local": {"hook": "post-local-sgd", "local_after_steps": 6},
    "own steps": {"inner_lr": 0.03},
    "now and then": {"push_every_steps": 2, "fetch_every_steps": 3},
}
FAULTS = {
    "alone": Faults(),
    "deaths": Faults(kills=2, server_kills=1, coordinator_kills=1, from_s=0.6, heal_at_s=4.0),
}


def options_of(name: str, variant: dict[str, Any]) -> dict[str, Any] | None:
    """The options of a variant; None if the method has no such key."""
    keys = {field.name for field in dataclasses.fields(registry.load("algorithms", name).Options)}
    keys.add("inner_lr")
    if not variant.keys() <= keys:
        return None
    return {key: value for key, value in SHORT.items() if key in keys} | variant


def way_of(name: str, options: dict[str, Any], faults: Faults, seed: int) -> str:
    """A digest of everything that was pushed, of all evaluations and of the result."""
    method = registry.load("algorithms", name)
    servers = 2 if method.shape.needs_servers else 0
    if not servers:
        faults = dataclasses.replace(faults, server_kills=0)
    choice, pushes = method.optimizer, method.compression
    job = job_file(
        3, servers, algorithm=(name, dict(options)), batch_size=4, portion_batches=2, seed=seed,
        optimizer=(choice.name, dict(choice.options)),
        compression=(pushes.name, dict(pushes.options)), epochs=6.0, evaluate_epochs=1.0,
        checkpoint_s=0.7, restarts_max=20, timeouts={"silent_s": 6.0, "resend_s": 0.3},
    )  # fmt: skip
    sent = Watcher(Push)
    simulation = Simulation(
        job, WithBuffers(samples=64), seed, faults=faults, checkers=(sent,),
        compute=ComputeOptions(step_s=0.05, spread=0.4),
        inner=lambda chosen: partial(OfTorch, chosen) if chosen.name != "none" else None,
    )  # fmt: skip
    outcome = simulation.run(200.0)
    digest = hashlib.sha256(outcome.weights.tobytes())
    for push in sent.messages():
        digest.update(repr((push.slot, push.seq, push.first_step, push.samples)).encode())
        for array in push.delta.arrays:
            digest.update(array.tobytes())
    row = (outcome.state, outcome.store.run.get("step"), outcome.store.run.get("samples"))
    return f"{digest.hexdigest()[:24]} {row}"


def main() -> None:
    found = {}
    for name in registry.names("algorithms"):
        for variant, options in VARIANTS.items():
            chosen = options_of(name, options)
            for circumstances, faults in FAULTS.items():
                if chosen is None:
                    continue
                key = f"{name}, {variant}, {circumstances}"
                try:
                    found[key] = way_of(name, chosen, faults, 3)
                except Exception as error:  # Of a variant that this method refuses.
                    found[key] = f"{type(error).__name__}: {error!s:.80}"
                print(key, found[key], file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
