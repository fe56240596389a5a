"""The user's task: loaded, checked, guarded in every call; its model, and what it prints."""
