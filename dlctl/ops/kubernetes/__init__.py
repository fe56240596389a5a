"""A job on Kubernetes: its manifest, and what the pods of that run."""
