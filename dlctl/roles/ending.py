"""How a run ends, in order, each step with a deadline and with names of those it waits for.

    draining      workers finish their portion, push what is accrued, wait for the acks
    evaluating    worker-0 evaluates what the servers have          (a finished run)
    saving        the last checkpoint
    shutting down workers and servers exit, then the agents
"""

from __future__ import annotations

from dataclasses import dataclass

DRAINING, EVALUATING, SAVING, SHUTTING_DOWN, AGENTS, OVER = (
    "draining", "evaluating", "saving", "shutting down", "stopping the agents", "over",
)  # fmt: skip
SHUTDOWN_S = 5.0
"""Between the request to exit and SIGKILL."""


@dataclass(slots=True)
class Ending:
    """What is being done on the way out."""

    state: str
    """The run's last state: stopped, finished or failed."""
    reason: str
    steps: list[str]
    """What is still to be done, the present step first."""
    grace_s: float
    until: float = 0.0
    killed: bool = False

    @property
    def step(self) -> str:
        return self.steps[0]

    def next(self) -> str:
        self.steps.pop(0)
        return self.step


def plan(state: str, *, drain: bool, evaluate: bool, save: bool) -> list[str]:
    """The steps of an ending."""
    wanted = {DRAINING: drain, EVALUATING: evaluate, SAVING: save}
    return [s for s, yes in wanted.items() if yes] + [SHUTTING_DOWN, AGENTS, OVER]
