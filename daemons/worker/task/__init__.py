"""The user's task: loaded, checked, guarded in every call; what its model has, and what it prints."""
