"""`dlctl join`: one worker on a machine that only its user can reach."""
