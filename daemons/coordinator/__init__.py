"""The coordinator process: the control plane of one run."""
