"""Limits that both ends of a protocol must know."""

from __future__ import annotations

REACH = 16
"""Pushes of a slot whose outcomes a shard stores. A worker's oldest unacknowledged push is no
further behind its newest one (`ShardClient.has_space`)."""
EVALUATE_S_MAX = 600.0
"""An evaluation that takes longer counts as hung."""
METRICS_MAX = 64
METRIC_NAME_CHARS_MAX = 200
"""All metrics of an evaluation, or of a portion of data, are in one message's header."""
FLIGHTS_MAX = 256
"""Servers whose pushes a worker measures in one report."""
STATUS_UNKNOWN = -255
"""The exit status of a process that was not a child of this one, so its status is unknown."""
