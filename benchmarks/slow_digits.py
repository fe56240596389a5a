"""The digits with steps that take as long as on a small GPU: they sleep, so that the daemons on one
machine do not wait for each other's cores. In the simulator, which has the times of a run or is
given them, they do not.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"
TASK = '''"""The digits, with steps that take a while."""

import socket
import sys
import time

from digits_task import Digits

IS_SIMULATED = "daemons.simulator.simulate" in sys.modules
STEP_S = 0.0 if IS_SIMULATED else {step_s}.get(socket.gethostname(), {otherwise_s})


class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(STEP_S)
        return super().loss(model, batch)


task = Slow()
'''


def place(directory: Path, step_s: Mapping[str, float], otherwise_s: float = 0.0) -> Path:
    """Write train.py and the module that it needs. step_s: by host name. Returns the directory of
    the data, which each host must see: only Python files are sent.
    """
    data = directory / "data"
    data.mkdir(exist_ok=True)
    shutil.copy(EXAMPLE / "digits.npz", data)
    text, here = (EXAMPLE / "train.py").read_text(), "Path(__file__).parent"
    assert here in text
    (directory / "digits_task.py").write_text(text.replace(here, f'Path("{data}")'))
    (directory / "train.py").write_text(TASK.format(step_s=dict(step_s), otherwise_s=otherwise_s))
    return data
