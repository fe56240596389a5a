"""The process beside the coordinator that has a tracker's package: wandb, or mlflow.

It takes rows from standard input and answers on standard output, a line of JSON each:

    {"number", "series", "at", "step", "values"}   -> {"number"}: the tracker has it, and all before
    {"number", "outcome"}                          -> {"number"}: the run has ended so
    (at the start)                                 -> {"begun": true}
    (whenever that fails)                          -> {"error": text}, and the process exits

At the end of its input without an outcome it leaves the tracker's run open: another coordinator
goes on with it. So does the next process, if this one dies: `<tracker>.json` has the tracker's run,
and the last step of each series.
"""
