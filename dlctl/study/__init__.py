"""Comparing methods: which job each one gets, how its keys are tuned, and who was better."""
