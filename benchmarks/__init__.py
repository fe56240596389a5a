"""Benchmarks of dlctl against bare baselines: `python -m benchmarks [CHAPTER...]`.

Absolute times depend on the machine, so every figure with a target is a ratio: dlctl and a baseline
without it alternate in the same run, each round gives one ratio, and the median of the rounds is
compared with the target, with minimum and maximum beside it. README.md explains how to read the
figures, and what limits each.
"""
