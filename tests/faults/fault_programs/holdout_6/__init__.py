"""Sixth hold-out: faults from public posts, each with the address it was made after, and healthy programs of many styles."""
