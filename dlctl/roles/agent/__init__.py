"""The agent role: starts and ends the daemons of one host."""
