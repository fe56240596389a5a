"""The server role: the owner of one shard."""
