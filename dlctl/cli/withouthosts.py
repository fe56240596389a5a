"""A run that has died while hosts of it cannot be reached: it waits for them, or does without."""

from __future__ import annotations

from dlctl.cli import nextstep, otherhosts
from dlctl.cli.recovery import Findings
from dlctl.errors import Unreachable
from dlctl.util import hints


def error(findings: Findings) -> Unreachable:
    """Nothing can be done as long as these hosts are away, but by the owner of the job file."""
    snapshot = findings.snapshot
    hosts = [host.ssh for name, host in otherhosts.of(snapshot).items() if name in findings.away]
    why = "\n".join(f"  {words}" for words in findings.away.values())
    names, are = " and ".join(hosts), "is" if len(hosts) == 1 else "are"
    return Unreachable(
        f"{snapshot.run_id} cannot go on without {names}:\n{why}",
        where=", ".join(hosts),
        hint=hints.either(
            hints.told(f"dlctl recover -j {snapshot.run_id}", f"when {names} {are} back"),
            hints.told(f"dlctl doctor {nextstep.job_file(snapshot)}", "says what is wrong there"),
            nextstep.without(snapshot, hosts),
        ),
    )
