"""The worker role: one replica of the model."""
