"""Requests to a running coordinator: keys, the client, and what to do if it does not respond."""
