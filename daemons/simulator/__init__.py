"""Runs in virtual time that compute real gradients: the user's task, in one process."""
