"""Findings about what is installed: dlctl, Python, torch, drivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dlctl.health.findings import FAULT, OK, WARNING, Facts, Finding
from dlctl.health.needs import HostNeed
from dlctl.util import hints
from dlctl.util.text import plural

SWITCH = "DLCTL_KERNELS"
"""That of `dlctl.kernels`, which imports numpy: commands that only look do without it."""
UNCOMPILED_MAX = 20
"""Modules without a .pyc file that cost nothing to speak of."""


def findings(need: HostNeed, facts: Facts, here: Facts) -> Iterator[Finding]:
    """`here`: the facts of the machine that starts the job."""
    yield _dlctl(need, facts, here)
    if not need.is_here:
        yield _python(need, facts, here)
    if facts["no_kernels"]:
        yield _no_kernels(need, facts)
    if facts["torch"]:
        yield _torch(need, facts, here)
        yield from _bytecode(need, facts)
    yield from _gpu(need, facts)


def _dlctl(need: HostNeed, facts: Facts, here: Facts) -> Finding:
    there, ours = facts["versions"], here["versions"]
    text = f"{there['dlctl']} with protocol {there['protocol']}"
    if (there["dlctl"], there["protocol"]) == (ours["dlctl"], ours["protocol"]):
        return Finding(need.name, "dlctl", OK, text, facts=there)
    return Finding(
        need.name,
        "dlctl",
        FAULT,
        f"{text}; this machine has {ours['dlctl']} with protocol {ours['protocol']}: "
        "they have to be the same, or `dlctl start` refuses",
        f"install dlctl {ours['dlctl']} for {facts['python']} there, or set python of this host in "
        "[[hosts]]",
        there,
    )


def _no_kernels(need: HostNeed, facts: Facts) -> Finding:
    """The loops in C are missing: nothing changes but the time of an update, and of packing."""
    text = "numpy updates parameters in servers, about a third as fast as C, and packs values: "
    text += str(facts["no_kernels"])
    # Without the cache: pip keeps what it has built there, too, and would install that again.
    install = f"{facts['python']} -m pip install --force-reinstall --no-cache-dir --no-deps dlctl"
    fix = f"with a C compiler and Python's headers there: {install}"
    if str(facts["no_kernels"]).startswith(SWITCH):
        fix = f"unset {SWITCH} there"
    return Finding(need.name, "kernels", WARNING, text, fix)


def _python(need: HostNeed, facts: Facts, here: Facts) -> Finding:
    there, ours = str(facts["versions"]["python"]), str(here["versions"]["python"])
    text = f"{there} at {facts['python']}"
    if _minor(there) == _minor(ours):
        return Finding(need.name, "Python", OK, text)
    return Finding(
        need.name,
        "Python",
        WARNING,
        f"{text}; this machine has {ours}: your task may find other libraries there, or none",
        f"install Python {_minor(ours)} there and set python of this host in [[hosts]]",
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _torch(need: HostNeed, facts: Facts, here: Facts) -> Finding:
    torch = facts["torch"]
    if "problem" in torch:
        missing = not facts["versions"]["torch"]
        what = "is not installed" if missing else "cannot be imported"
        mark = FAULT if need.workers else WARNING
        whom = f"{plural(need.workers, 'worker')} here" if need.workers else "no worker is here"
        fix = f"{facts['python']} -m pip install torch"
        if not missing:
            fix = f"{facts['python']} -c 'import torch' there shows more; often another build helps"
        if not need.is_here:
            fix = hints.either(fix, "workers = 0 for this host in [[hosts]]")
        text = f"{what} for {facts['python']} ({torch['problem']}); {whom}"
        return Finding(need.name, "torch", mark, text, fix)
    text = f"{torch['version']}, " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "without CUDA")
    ours = here["torch"].get("version") or here["versions"]["torch"]
    if ours and ours.partition("+")[0] != torch["version"].partition("+")[0]:
        return Finding(
            need.name,
            "torch",
            WARNING,
            f"{text}; this machine has {ours}: replicas of one model may compute differently",
            f"install torch {ours.partition('+')[0]} there",
        )
    return Finding(need.name, "torch", OK, text)


def _bytecode(need: HostNeed, facts: Facts) -> Iterator[Finding]:
    """Modules that every process compiles again: their folder is read-only, another user's, or
    PYTHONDONTWRITEBYTECODE is set.
    """
    torch = facts["torch"]
    if torch.get("uncompiled", 0) > UNCOMPILED_MAX:
        text = f"{plural(torch['uncompiled'], 'module')} of torch and others in {torch['place']} "
        text += "have no .pyc files, and none are written: each start compiles them again"
        fix = f"{facts['python']} -m compileall -q {torch['place']} (as the owner of that folder)"
        fix = hints.either(fix, "unset PYTHONDONTWRITEBYTECODE if it is set")
        numbers = {"uncompiled": torch["uncompiled"]}
        yield Finding(need.name, "bytecode", WARNING, text, fix, numbers)


def _counted(devices: Sequence[str]) -> str:
    """Devices of one kind: "8 x NVIDIA H200, 570.1"."""
    many = Counter(devices)
    return "; ".join(name if count == 1 else f"{count} x {name}" for name, count in many.items())


def _gpu(need: HostNeed, facts: Facts) -> Iterator[Finding]:
    gpu, torch = facts["gpu"], facts["torch"]
    usable = torch.get("devices", 0)
    names = _counted(gpu["devices"])
    if gpu["problem"]:
        fix = "run nvidia-smi there; often a driver upgrade needs a reboot"
        yield Finding(need.name, "GPU", WARNING, f"nvidia-smi fails: {gpu['problem']}", fix)
    elif need.workers and need.device == "cuda" and torch.get("version") and not usable:
        yield Finding(
            need.name,
            "GPU",
            FAULT,
            f"torch finds none, and the job requires one ({names or 'no driver found'})",
            'set device = "auto" in [workers], or workers = 0 for this host',
        )
    elif gpu["devices"] and torch.get("version") and not usable:
        yield Finding(
            need.name,
            "GPU",
            WARNING,
            f"{names}; but torch finds none, so workers compute on the CPU",
            "install a torch with CUDA for this driver",
        )
    elif gpu["devices"]:
        yield Finding(need.name, "GPU", OK, names)
    elif need.workers:
        yield Finding(need.name, "GPU", OK, "none found: workers compute on the CPU")
