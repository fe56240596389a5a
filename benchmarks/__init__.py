"""What dlctl costs, measured against the bare thing: `python -m benchmarks [CHAPTER...]`.

Absolute times say more about the machine than about dlctl, so every figure with a target is a
ratio: dlctl and a baseline without it take turns in the same run, one ratio comes out of each
round, and the median of the rounds is held against what was asked, with the smallest and largest
beside it. How to read the figures, and what limits each, stands in README.md.
"""
