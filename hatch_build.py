"""Builds what a wheel has beside the modules: the manual, and the kernels in C.

`python hatch_build.py` compiles the kernels in place. Without a compiler, or without Python's
headers, dlctl installs and works all the same: numpy computes then.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # as a script, where hatchling is not installed
    BuildHookInterface = object

ROOT = Path(__file__).parent
KERNELS = ROOT / "dlctl" / "kernels"
SOURCE, LIBRARY = KERNELS / "kernels.c", KERNELS / "_kernels.abi3.so"
RECORD = KERNELS / "built.json"
# Each operation is rounded on its own, as numpy's are; no one reads errno.
FLAGS = ["-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]
BASELINES = {"x86_64": "-march=x86-64", "aarch64": "-march=armv8-a"}
"""Whatever CC says: older processors may load the library. The loops choose instructions when it is
loaded."""
ABI = "-DPy_LIMITED_API=0x030B0000"
"""One library for all versions of Python from 3.11 on."""
COMPILE_S = 120


class Parts(BuildHookInterface):  # type: ignore[misc]
    """Adds them to a wheel; an editable installation reads them in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        built = compiled()
        if version == "editable":
            return
        if built:
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform()}"
            build_data["artifacts"] += [f"/{path.relative_to(ROOT)}" for path in (LIBRARY, RECORD)]
        manual = _manual()
        build_data["force_include"][str(manual.MANUAL)] = "dlctl/manual"
        self.folder = tempfile.TemporaryDirectory()
        for page in manual.write(Path(self.folder.name), self.metadata.version):
            build_data["shared_data"][str(page)] = f"share/man/{page.parent.name}/{page.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()


def compiled() -> bool:
    """Compile the kernels, and return whether they are there; says why if not."""
    for path in (LIBRARY, RECORD):
        path.unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory(dir=KERNELS) as folder:
        made = Path(folder) / LIBRARY.name
        command = [*compiler, *FLAGS, *_baseline(), ABI, f"-I{include}", "-o", str(made)]
        command += [str(SOURCE), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
            ended = f"{compiler[0]} ended with {done.returncode}"
            why = (done.stderr.strip() or ended) if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if not why and not made.is_file():
            why = f"{compiler[0]} wrote nothing"
        if why:
            print(f"the kernels were not built, numpy is used: {why[-400:]}", file=sys.stderr)
            return False
        digests = {"source": _digest(SOURCE), "library": _digest(made)}
        made.replace(LIBRARY)
    RECORD.write_text(json.dumps(digests), encoding="utf-8")
    return True


def _baseline() -> list[str]:
    """The option for any processor of this kind; none for a kind that has one only."""
    option = BASELINES.get(os.uname().machine)
    return [] if option is None else [option]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def platform() -> str:
    """The tag of a wheel for this machine."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _manual() -> Any:
    """docs/manpages.py, which is no package."""
    spec = importlib.util.spec_from_file_location("manpages", ROOT / "docs" / "manpages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    compiled()
