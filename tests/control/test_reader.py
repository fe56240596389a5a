"""Who looks on from afar asks a coordinator with keys, over one connection."""

from __future__ import annotations

from fake_coordinator import RING, coordinator_with_keys, done

from daemons.transport import zap
from dlctl.control import reader
from dlctl.wire.messages import Reply, Request

ROWS = [{"name": f"worker-{slot}", "at": 1.0} for slot in range(100)]


def test_a_status_of_many_pages_takes_one_connection(monkeypatch):
    """A key may come only so often."""
    monkeypatch.setattr(zap, "COMINGS_MAX", 1.0)
    monkeypatch.setattr(zap, "COMINGS_PER_S", 0.0)

    def page(request: Request) -> list[Reply]:
        first = request.arguments["first"]
        shown = ROWS[first : first + 8]
        return [done(request, now=0.0, run={"state": "running"}, daemons=shown, of=len(ROWS))]

    with coordinator_with_keys(page, "reader") as (address, listener):
        key = reader.ReaderKey(
            "digits-7f3a", address, RING.public("coordinator"), RING.secret("reader")
        )
        found = reader.status(key, 3.0)
        assert listener.gatekeeper.refused == 0
    assert [row["name"] for row in found["daemons"]] == [row["name"] for row in ROWS]
    assert found["run"] == {"state": "running"}
