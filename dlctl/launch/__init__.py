"""Launchers: how the first process gets onto a host. Everything else is started by it."""
