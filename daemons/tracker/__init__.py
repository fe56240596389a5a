"""The process beside the coordinator that has a tracker's package: wandb, or mlflow.

It takes rows from standard input and answers on standard output, a line of JSON each:

    {"number", "series", "at", "step", "values"}  -> {"number"}: this and all before are written
    {"number", "outcome"}                         -> the same; the run has ended so, or goes on
                                                     with another coordinator: ""
    (at the start)                                -> {"begun": true}
    (whenever that fails)                         -> {"error": text}, and the process exits

With the outcome "", and at the end of its input, it leaves the tracker's run open for the next
process. That one also goes on if this one dies: `<tracker>.json` has the tracker's run, and the
last step of each series.

If its coordinator is gone it delivers what has come, within limits. A database that a package is
making is finished first: it may be broken otherwise.
"""
