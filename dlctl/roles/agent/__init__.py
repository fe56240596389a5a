"""The agent role: starts and terminates the daemons of one host."""
