"""A worker: one model replica. The only process that imports torch and the user's code."""
