"""A replica of several processes: they start and fail together, and each has a part of the model."""
