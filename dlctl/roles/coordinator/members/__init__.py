"""The coordinator's records of its daemons: their states, addresses and exits."""
