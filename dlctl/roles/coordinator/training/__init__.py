"""How the training goes on: leases, the lead of the method, progress and rates."""
