"""Templates: processes of each host that have imported what its daemons import, and fork them."""
