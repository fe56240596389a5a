"""Found instead of the real daemons when this directory is first in PYTHONPATH."""
