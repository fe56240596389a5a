"""The four roles as pure machines, and the small machines that they share."""
