"""The agent process: one per host, starts and ends the daemons there."""
