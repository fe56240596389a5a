"""Files of a run that daemons write, load and send to other hosts."""
