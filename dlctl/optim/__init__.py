"""Server optimisers: what a pushed gradient does to a shard, in place."""
