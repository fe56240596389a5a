"""The simulator: all four roles in virtual time, over a network that may fail in every way.

`simulation.Simulation` is the entry point. It performs the effects of the machines that `daemons/`
runs, sends every message through the real `dlctl.wire.codec`, and replays to the last byte from a
seed.
"""
