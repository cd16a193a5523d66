"""Ninth hold-out: faults from forums and public fixes in users' own training scripts, and healthy programs after public examples."""
