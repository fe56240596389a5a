"""Facts about machines and links, and what they mean for a job: pure functions, no effects.

`needs.py` says what a job asks of every host; `software.py`, `resources.py` and `network.py` turn
facts (as `daemons.node` sends them) into findings, each with its fix.
"""
