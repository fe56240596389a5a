"""A real Slurm on one machine: a controller in a lab, and one slurmd on each of its hosts.

    with SlurmCluster(nodes=3) as slurm:
        slurm.run("sbatch", "job.sh")             as a user types it
        slurm.cluster.lose("h2")                  the node loses its power

The lab and the hosts are those of `tests/hosts`, and need what these need; and these Debian
packages: slurmctld, slurmd, slurm-client, munge. `missing()` says what is not here.
"""
