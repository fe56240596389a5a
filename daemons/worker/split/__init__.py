"""Split learning: the two sides of a model that parties divide (`dlctl/job/parties.py`)."""
