"""The measured peers: one row for each, with its rate.

A rate is that of one step of one worker; for the mean of four gradients (DDP) it is twice as large.
Those of DiLoCo's outer step are the paper's, both for DiLoCo and for dlctl. `rates.py` shows how
many steps each method needs, at these rates and at others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.settings import why_not_there

ONE_SERVER = """[servers]
count = 1
[data]
portion_batches = 32
"""
LOCAL_STEPS = """[algorithm]
name = "diloco"
local_steps = {steps}
[inner]
name = "sgd"
lr = {{lr}}
"""
LOCAL_SGD = ONE_SERVER + LOCAL_STEPS
"""The outer step is DiLoCo's by default."""
LOCAL_SGD_SLOW = (
    """[servers]
count = 1
fetch_values = "float16"
[data]
portion_batches = {steps}
[compression]
name = "int8"
"""
    + LOCAL_STEPS
)
"""Half the bytes one way, a quarter the other way, and new data once per round."""
DOWNPOUR = (
    ONE_SERVER
    + """[algorithm]
name = "downpour"
fetch_every_steps = {fetch}
push_every_steps = {push}
push_before_fetch = true
overlap = false
[inner]
name = "sgd"
lr = 0.1
[optimizer]
name = "sgd"
lr = {{lr}}
"""
)
SPARSE = """[compression]
name = "topk-sampled"
density = {density}
"""


@dataclass(frozen=True)
class Peer:
    name: str
    program: str
    """A module of this folder."""
    lr: float
    has_server: bool = False
    """Rank 0 is the server, at the head; the workers are the ranks from 1."""
    is_one_program: bool = False
    """Started once, at the head; it starts its other processes."""
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    """An optional package."""
    is_ours: bool = False
    """It is dlctl: if it fails, the benchmark fails."""

    def why_not(self) -> str:
        """What is missing here; "" if it can be measured."""
        return why_not_there(self.needs)


def dlctl(name: str, lr: float, job: str) -> Peer:
    return Peer(name, "dlctl_start", lr, is_one_program=True, options={"job": job}, is_ours=True)


def diloco(local_steps: int) -> Peer:
    options = {
        "method": "diloco", "local_steps": local_steps, "outer_lr": 0.7, "outer_momentum": 0.9,
    }  # fmt: skip
    return Peer(f"DiLoCo H={local_steps}, gloo", "local_sgd", 0.1, options=options)


def post_local(local_steps: int) -> Peer:
    options = {"method": "postlocal", "local_steps": local_steps}
    return Peer(f"post-local SGD H={local_steps}", "local_sgd", 0.1, options=options)


def powersgd(rank: int) -> Peer:
    return Peer(
        f"DDP, PowerSGD rank {rank}", "ddp", 0.2, options={"hook": "powersgd", "rank": rank}
    )


HOGWILD = Peer("Hogwild", "hogwild", 0.1, is_one_program=True)
DDP = Peer("DDP", "ddp", 0.2)
DDP_FP16 = Peer("DDP, fp16", "ddp", 0.2, options={"hook": "fp16"})
RPC = Peer("torch RPC server", "rpc", 0.1, has_server=True)
RAY = Peer("Ray actor server", "ray_actor", 0.1, is_one_program=True, needs="ray")
FAST = [
    dlctl("dlctl", 0.1, LOCAL_SGD.format(steps=8)),
    dlctl("dlctl, Downpour", 0.04, DOWNPOUR.format(fetch=16, push=16)),
    dlctl(
        "dlctl, Downpour, top-k 5 %",
        0.05,
        DOWNPOUR.format(fetch=8, push=1) + SPARSE.format(density=0.05),
    ),
    HOGWILD, DDP, RPC, DDP_FP16, powersgd(4), post_local(16), diloco(8), diloco(16), diloco(64),
    RAY,
]  # fmt: skip
"""On one machine. The others are compared with the first."""
SLOW = [
    dlctl("dlctl", 0.1, LOCAL_SGD_SLOW.format(steps=64)),
    dlctl(
        "dlctl, Downpour, top-k 10 %",
        0.03,
        DOWNPOUR.format(fetch=64, push=16) + SPARSE.format(density=0.1),
    ),
    DDP, DDP_FP16, powersgd(4), RPC, post_local(16), diloco(16), diloco(64),
]  # fmt: skip
"""Behind slow links. Without peers that need one machine, or are their own cluster."""
