"""What a user's torchrun command starts, so that dlctl can start it: with the same environment, and
as one worker.
"""

from __future__ import annotations

from dlctl.errors import UsageError

MODULE = "torch.distributed.run"


def taken_apart(words: list[str]) -> tuple[int, list[str]]:
    """(processes, what follows `python` in the command of each) for what follows `python` in the
    user's command, which may be torchrun's. Raises UsageError, and exits for arguments that are
    none of torchrun's, as it does.
    """
    if words[:2] != ["-m", MODULE]:
        return 1, words
    from torch.distributed.run import determine_local_world_size, get_args_parser

    given = get_args_parser().parse_args(words[2:])
    if given.nnodes not in ("1", "1:1"):
        raise UsageError(
            f"torchrun --nnodes {given.nnodes}: the processes of a worker are on one machine",
            hint="join once from each machine: every one is a worker of its own",
        )
    if given.no_python or given.run_path:
        raise UsageError("torchrun has to start a Python file, or -m MODULE")
    program = ["-m"] if given.module else []
    return (
        determine_local_world_size(given.nproc_per_node),
        [*program, given.training_script, *given.training_script_args],
    )
