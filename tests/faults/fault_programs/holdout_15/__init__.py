"""Fifteenth hold-out: faults from people's questions, issues and pull requests, and healthy programs of which half look odd."""
