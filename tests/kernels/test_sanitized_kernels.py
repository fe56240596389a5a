"""The loops in C under the sanitizers of addresses and of undefined behaviour."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from dlctl import kernels

HERE = Path(__file__).parent
SANITIZERS = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
PROGRAM = """
import importlib.machinery, importlib.util, sys
import pytest
from dlctl import kernels
_, library, *tests = sys.argv
loader = importlib.machinery.ExtensionFileLoader("_kernels", library)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_kernels", loader))
loader.exec_module(module)
kernels._loaded = lambda: (module, "")
sys.exit(pytest.main(["-q", "-n", "0", *tests]))
"""


def library_of(sanitizer: str) -> Path | None:
    """The sanitizer's library, which has to be loaded before all others."""
    found = subprocess.run(
        ["cc", f"-print-file-name=lib{sanitizer}.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Path(found) if os.path.isabs(found) else None


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(kernels.missing()), reason=f"no kernels: {kernels.missing()}")
def test_no_loop_leaves_its_arrays(tmp_path: Path) -> None:
    """All tests of `test_kernels.py` and of the optimisers, with arrays of the exact sizes."""
    if (asan := library_of("asan")) is None:
        pytest.skip("this compiler has no library of the address sanitizer")
    library = tmp_path / "_kernels.abi3.so"
    flags = ["-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]
    include = sysconfig.get_path("include")
    subprocess.run(
        ["cc", *SANITIZERS, *flags, "-DPy_LIMITED_API=0x030B0000", f"-I{include}", "-o",
         str(library), str(kernels.SOURCE), "-lm"], check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library), str(HERE / "test_kernels.py"),
         str(HERE.parent / "optim" / "test_rules.py"),
         f"{HERE.parent / 'fuzz' / 'test_fuzz.py'}", "-k", "not fuzz or kernels"],
        # Python's own allocator would hide an access beyond a block.
        env={**os.environ, "LD_PRELOAD": str(asan), "PYTHONMALLOC": "malloc",
             "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
