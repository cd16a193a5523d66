"""Eighth hold-out: faults from public issues and fixes, each with its address, and healthy programs after public examples."""
