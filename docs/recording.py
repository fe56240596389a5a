"""Records docs/status.svg: runs the digits example, kills a worker, and renders `dlctl status`.

All of it is real output, rendered by rich. Run `python docs/recording.py`; requires dlctl and
torch.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
EXAMPLE = DOCS.parent / "examples" / "digits"
COMMAND = [sys.executable, "-m", "dlctl"]
VICTIM = "worker-1"
WARM_S, NOTICED_S = 15.0, 0.4


def dlctl(*arguments: str) -> str:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def pid_of(name: str) -> int:
    daemons = json.loads(dlctl("status", "--json"))["daemons"]
    return int(next(row["pid"] for row in daemons if row["name"] == name))


def record() -> list[tuple[str, str]]:
    """(command, its output)."""
    job = Path("job.toml")
    job.write_text(re.sub(r"^stop = .*$", "stop = { seconds = 300 }", job.read_text(), flags=re.M))
    dlctl("start", "job.toml")
    try:
        time.sleep(WARM_S)
        shots = [("dlctl status", dlctl("--color", "always", "status"))]
        victim = pid_of(VICTIM)
        os.kill(victim, signal.SIGKILL)
        time.sleep(NOTICED_S)
        shots.append((f"kill -9 {victim}    # {VICTIM}", ""))
        shots.append(("dlctl status", dlctl("--color", "always", "status")))
    finally:
        dlctl("stop", "--kill")
    return shots


def draw(shots: list[tuple[str, str]]) -> str:
    lines = Text()
    for command, output in shots:
        lines.append("$ ", "bold green").append(f"{command}\n", "bold")
        lines.append_text(Text.from_ansi(output)).append("\n" if output else "")
    width = max(line.cell_len for line in lines.split("\n"))
    console = Console(record=True, file=io.StringIO(), width=width + 1, force_terminal=True)
    console.print(lines, end="")
    svg = console.export_svg(title="dlctl", unique_id="dlctl")
    return re.sub(
        r"@font-face \{.*?\}\n", "", svg, flags=re.S
    )  # They would be loaded over the network.


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        for file in ("job.toml", "train.py", "digits.npz"):
            shutil.copy(EXAMPLE / file, folder)
        os.chdir(folder)
        svg = draw(record())
        os.chdir(DOCS)
    (DOCS / "status.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
