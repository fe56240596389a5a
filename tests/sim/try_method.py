"""Try a method in the simulator: `python tests/sim/try_method.py NAME [KEY=VALUE]... [--seeds N]`.

Three workers and two servers train a small model, once alone and then while daemons die, with other
deaths in every seed. Exits 1 if a run fails, stands still, does not learn, or learns wrongly:

- replicas push fewer or more samples than they have computed;
- a shard has not applied what it has acknowledged, once, or the shards differ in that;
- the parameters are not what the pushes add up to, if the shard side averages pushes or applies
  them unchanged; nor what one process makes of the same batches, if the method declares that a step
  is the mean of gradients.

If the rule is the shard side's own, there is nothing that the pushes could be compared with. Then a
run of one replica has to end the same on one server as on two, and if it is stopped in between.
Whatever else a shard side or a replica computes is not compared with anything: it says so, and a
loop of your own has to. KEY is one of `[algorithm]`; `lr` is the servers' rate, `inner_lr` that of
the replicas.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from account import Account, Recorded
from lone_replica import differences
from pydantic import TypeAdapter
from simulated import job_file

from dlctl import registry
from dlctl.algorithms.base import Method
from dlctl.algorithms.means import Mean
from dlctl.errors import DlctlError
from dlctl.job.inner import NONE
from dlctl.sim.checkers import LivenessChecker
from dlctl.sim.checkers.base import PromiseBroken
from dlctl.sim.faults import Faults
from dlctl.sim.simulation import Simulation

HEAL_S = 4.0
"""Virtual seconds after which nobody dies any more."""
DEATHS = Faults(kills=1, server_kills=1, coordinator_kills=1, heal_at_s=HEAL_S)
EPOCHS, SAMPLES = 32, 62
"""So that batches are of different sizes."""
LEARNT = 0.1
"""The most of its first loss that a run may end with."""


def tried(
    name: str, options: dict[str, Any], seed: int, faults: Faults | None, lr: float,
    epochs: int = EPOCHS,
) -> str:  # fmt: skip
    """Train with a method; returns what is wrong, "" if nothing is."""
    problem = Recorded(SAMPLES)
    job = job_file(
        3, 2, algorithm=(name, options), batch_size=4, portion_batches=2,
        epochs=float(epochs), seed=seed, optimizer=("sgd", {"lr": lr}), restarts_max=20,
    )  # fmt: skip
    account = Account(registry.load("algorithms", name), problem, alone=faults is None)
    checkers = (LivenessChecker(HEAL_S), account)
    simulation = Simulation(job, problem, seed, faults=faults, checkers=checkers)
    try:
        outcome = simulation.run()
    except PromiseBroken as broken:
        return "; ".join(filter(None, (str(broken), account.waits(simulation.world))))
    if outcome.state != "finished":
        return f"it has not finished: {outcome.reason}"
    loss, first = (problem.evaluate(w)["loss"] for w in (outcome.weights, problem.initial()))
    return "" if loss <= LEARNT * first else f"it has not learnt: loss {loss:.4g} of {first:.4g}"


def has_own_rule(method: Method, options: dict[str, Any]) -> bool:
    """Whether only its shard side knows what pushes add up to."""
    if method.shard is None:
        return False
    known = method.Options.__dataclass_fields__
    side = method.shard.of(method.Options(**{n: v for n, v in options.items() if n in known}))
    return not (side.averages or side.applies_as_pushed)


def not_compared(method: Method, options: dict[str, Any]) -> list[str]:
    """What no run shows to be right."""
    found = []
    given = method.Options(**options)
    if method.shard is not None:
        if has_own_rule(method, options):
            found.append(
                "the parameters with what the pushes add up to: the rule is the side's own"
            )
        elif method.mean is not Mean:
            found.append(
                f"{method.mean.__name__} with the mean it stands for: it is taken as it is"
            )
        if not method.push_kind(given).is_all:
            found.append("a push with all steps of its replica (is_all=False)")
    return found


def options_of(name: str, given: list[str]) -> tuple[Method, dict[str, Any], dict[str, float]]:
    """(the method, its options, the rates). Raises what `registry.load`, or wrong values, raise."""
    method: Method = registry.load("algorithms", name)
    pairs = dict(option.partition("=")[::2] for option in given)
    rates = {key: float(pairs.pop(key)) for key in ("lr", "inner_lr") if key in pairs}
    if "inner_lr" in rates and method.inner.name == NONE:
        raise TypeError("inner_lr: the method declares no optimiser of the replicas (Method.inner)")
    options = {key: _value(text) for key, text in pairs.items()}
    TypeAdapter(method.Options).validate_python(options)
    return method, options, rates


def _value(text: str) -> Any:
    """As in a job file; a word needs no quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    try:
        method, options, rates = options_of(given.name, given.options)
    except (DlctlError, ImportError, TypeError, ValueError) as error:
        parser.error(f"{error}")
    lr, wrong = rates.pop("lr", method.optimizer.options.get("lr", 0.03)), 0
    for what in not_compared(method, options):
        print(f"not compared: {what}")
    options |= rates
    if has_own_rule(method, options):
        found = differences(given.name, options, method.optimizer.name, lr, seed=0)
        print(*found, sep="\n", end="\n" if found else "")
        wrong += len(found)
    for seed in range(given.seeds):
        for what, faults in (("alone", None), ("with deaths", DEATHS)):
            if fault := tried(given.name, options, seed, faults, lr):
                print(f"seed {seed}, {what}: {fault}")
                wrong += 1
    print(f"{wrong} of the runs are wrong" if wrong else f"{2 * given.seeds} runs are right")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
