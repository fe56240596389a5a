"""Asking a running coordinator: keys, requests, and what its silence means."""
