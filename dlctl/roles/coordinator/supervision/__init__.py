"""How daemons join, fail, are replaced, and learn of each other."""
