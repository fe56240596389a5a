"""Ray is no part of `make install`: `make ray` has it, and sets the variable."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "DLCTL_RAY" in os.environ else ["test_*.py"]
