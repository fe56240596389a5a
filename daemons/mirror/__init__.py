"""The process beside the coordinator that uploads checkpoints to the mirror of the run.

It takes rows from standard input and answers on standard output, a line of JSON each:

    {"number", "checkpoint"}     -> {"number", "mirrored"}: this one or a newer one is in the mirror
    (at the start)               -> {"begun": true, "mirrored"}: the newest one that is there
    (during an upload)           -> {"sent": bytes so far, "nbytes": of the checkpoint}
    (whenever that fails)        -> {"error": text, "cause": text}, and the process exits

It reads the run directory only. What it has uploaded of an unfinished checkpoint is in
`mirror/uploaded.json`, so the next process goes on there. A checkpoint under way has hard links in
`mirror/`: the run may remove it meanwhile. It ends with its coordinator.
"""
