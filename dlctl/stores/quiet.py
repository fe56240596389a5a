"""Libraries of stores log what they also raise, and headers with it: only the error is shown."""

from __future__ import annotations

import logging


def silence(*names: str) -> None:
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
