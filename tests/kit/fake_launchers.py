"""Commands that behave as ssh and Slurm do, on this machine alone: a "host" is only a directory of
its own. What really happens between machines is tested in `tests/hosts` and `tests/slurm`.
"""

from __future__ import annotations

from pathlib import Path

SSH = """#!/bin/sh
[ "$1" = -G ] && { echo hostname 127.0.0.1; exit; }
while [ "$1" != -- ]; do shift; done
mkdir -p "MACHINES/$2"
HOME="MACHINES/$2" DLCTL_HOST="$2" exec sh -c "cd && $3"
"""
SBATCH = """#!/bin/sh
job=$(($(cat MACHINES/last 2>/dev/null || echo 16) + 1))
echo $job > MACHINES/last
sed -n 's/^#SBATCH --nodes=//p' "$2" > MACHINES/nodes
SLURM_JOB_ID=$job setsid bash "$2" </dev/null >> "${2%.sh}.log" 2>&1 &
echo $! > MACHINES/$job
echo $job
"""
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
for node in $(seq 0 $(($(cat MACHINES/nodes) - 1))); do
    SLURM_NODEID=$node SLURMD_NODENAME=node-$((node + 1)) "$@" &
done
wait
"""
SCONTROL = """#!/bin/sh
pid=$(cat "MACHINES/$4" 2>/dev/null) || { echo Invalid job id specified >&2; exit 1; }
state=RUNNING
grep -qs "^State:.[^Z]" /proc/$pid/status || state=COMPLETED
echo "JobId=$4 JobState=$state Reason=None Restarts=0 RunTime=00:00:09 TimeLimit=UNLIMITED" \\
    "NodeList=node-[1-2] ExitCode=0:0"
"""
SCANCEL = """#!/bin/sh
kill -TERM -- "-$(cat "MACHINES/$1")"
"""
SQUEUE = "#!/bin/sh\n"
SINFO = "#!/bin/sh\necho 127.0.0.1\n"
COMMANDS = {
    "ssh": SSH, "sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL,
    "squeue": SQUEUE, "sinfo": SINFO,
}  # fmt: skip


def install(directory: Path) -> Path:
    """Write the commands; returns the directory that goes first into PATH."""
    tools, state = directory / "tools", directory / "machines"
    tools.mkdir()
    state.mkdir()
    for name, text in COMMANDS.items():
        (tools / name).write_text(text.replace("MACHINES", str(state)))
        (tools / name).chmod(0o755)
    return tools
