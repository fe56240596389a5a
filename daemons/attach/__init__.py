"""A worker inside of the user's own program: `dlctl.attach`."""
