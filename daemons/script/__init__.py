"""The process of a worker whose job has a training loop of its own, `[job] script` or `module`."""
