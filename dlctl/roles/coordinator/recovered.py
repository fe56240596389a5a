"""What a coordinator that is started by `dlctl recover` corrects in what the one before has left.

The command looks at what is there, and puts that into the run's key `recovery`:

    served  servers that have left a shard: their next ones go on with it
    gone    agents of hosts that were asked, and are not there any more
"""

from __future__ import annotations

from collections.abc import Mapping

from dlctl.messages import Json


def corrected(memory: Mapping[str, Json], recovery: Mapping[str, list[str]]) -> dict[str, Json]:
    """The rows of daemons that change.

    - A power loss may have taken the note that a shard has had a server, and left its journal.
    - Nobody has to wait for a word of an agent that is not there.
    - Quarantined workers are started again if there are no others: the run would stand still.
    """
    rows = {key: row for key, row in memory.items() if key.startswith("daemon/")}
    changed: dict[str, Json] = {}
    for key, row in rows.items():
        name = key.removeprefix("daemon/")
        if name in recovery.get("served", ()):
            changed[key] = {**row, "has_served": True}
        elif name in recovery.get("gone", ()):
            changed[key] = {**row, "registered": False}
    workers = {key: row for key, row in rows.items() if row.get("role") == "worker"}
    if all(row.get("state") == "quarantined" for row in workers.values()):
        changed |= {key: {**row, "state": "stopped"} for key, row in workers.items()}
    return changed
