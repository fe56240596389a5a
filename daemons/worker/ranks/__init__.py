"""A replica of several processes: they start and fail together, each with a part of it."""
