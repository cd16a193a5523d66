"""Eleventh hold-out: faults of people's own training scripts, from issues, pull requests and forums, and healthy programs."""
