"""Tenth hold-out: faults from people's questions and issues that end with a fix, and healthy programs after public examples."""
