"""Inputs that nobody has thought of: `make fuzz` breaks what comes from outside, for a minute.

Whatever another process, host or person wrote is read by one of the targets here. Each is a module
with a function `target(data)` that raises only if a property is broken: an error of another class
than the documented one, a text that could steer a terminal, a second of work or many megabytes for
a few bytes.

    make fuzz                              all targets, a minute in all
    make fuzz TIME=600 ONLY=wire SEED=7    one of them for longer, with the same random choices
    python -m tests.fuzz --replay FILE     one input once more, with the traceback

Inputs are valid ones (`seeds`, made anew each time) that `mutate` has changed: it takes them apart
as their reader does, changes a value and puts lengths and checksums right again, so that the change
comes through to the code behind them; or it changes bytes. There is no feedback from coverage: what
decides here is knowledge of the format, and much of the code that reads is C, which a tracer of
Python does not see. Every input that has broken something stays in `corpus/<target>/`, and
`make test` tries those first, then a few thousand new ones, always the same.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kit"))  # what tests share, also without pytest
