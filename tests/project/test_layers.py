"""Who may import whom: the contracts of pyproject.toml, and what may not be loaded at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_import_contract_is_kept() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_starts_without_torch_and_without_the_validator() -> None:
    script = (
        "import sys, runpy\n"
        "sys.argv = ['daemons.server']\n"
        "try: runpy.run_module('daemons.server', run_name='__main__')\n"
        "except SystemExit as usage: assert 'usage' in str(usage)\n"
        "from dlctl import registry\n"
        "[registry.load('optimizers', name) for name in registry.names('optimizers')]\n"
        "[registry.load('compressors', name) for name in registry.names('compressors')]\n"
        "print(sorted({'torch', 'pydantic', 'click', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
