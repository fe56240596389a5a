"""The coordinator role: the control plane of one run."""
