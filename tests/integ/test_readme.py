"""The five commands of the README, word by word, one after the other, on the job of `init`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from workplace import Workplace

README = Path(__file__).parents[2] / "README.md"


def test_the_five_commands_work_in_order(place: Workplace) -> None:
    section = README.read_text().partition("<!-- commands -->")[2].partition("\n## ")[0]
    commands = re.findall(r"^ {4}(dlctl .+)$", section, re.M)
    assert len(commands) == 5
    program = place.path / "bin" / "dlctl"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable} -P\nfrom dlctl.cli.app import main\nimport sys\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    env = place.env | {"PATH": f"{program.parent}:{place.env['PATH']}"}
    done = subprocess.run(
        ["bash", "-ex", "-c", "\n".join(commands)],
        capture_output=True, text=True, cwd=place.path, env=env, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^worker-0 +\d+ +running ", done.stdout, re.M), done.stdout
    assert re.search(r"^worker-0 .*off.*5 ?MB/s", done.stdout, re.M), done.stdout
    assert "stopped" in done.stdout + done.stderr
