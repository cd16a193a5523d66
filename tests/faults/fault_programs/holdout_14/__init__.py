"""Fourteenth hold-out: a smaller set of faults from issues, pull requests and forum posts, and healthy programs."""
