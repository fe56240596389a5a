"""Numbers that both ends of a conversation must know."""

from __future__ import annotations

REACH = 16
"""Pushes of a slot whose outcomes a shard remembers. A worker's oldest push without an ack is no
further behind its newest one (`ShardClient.has_room`)."""
EVALUATE_S_MAX = 600.0
"""An evaluation that takes longer hangs."""
METRICS_MAX = 64
METRIC_NAME_CHARS_MAX = 200
"""All metrics of an evaluation, or of a portion of data, travel in one message's header."""
STATUS_UNKNOWN = -255
"""The exit status of a process that was not our child: nobody can say what it was."""
