"""Training loops of other packages as workers of a run: one module for each package.

They use `dlctl.attach` as a script does, and nothing else of dlctl.
"""
