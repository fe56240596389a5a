"""One service for each need of a replica (`dlctl/algorithms/needs.py`), implemented once."""
