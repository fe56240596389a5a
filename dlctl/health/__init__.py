"""Checks of machines and links against the needs of a job: pure functions, no effects.

`needs.py` computes what a job requires of every host; `software.py`, `resources.py` and
`network.py` turn facts (from `daemons.node`) into findings, each with its fix.
"""
