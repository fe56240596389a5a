"""What a job is: its sections, and what follows from them. `dlctl/jobfile` reads it from a file."""
