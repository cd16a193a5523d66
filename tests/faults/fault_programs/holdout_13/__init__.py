"""Thirteenth hold-out: faults from issues, pull requests and a forum answer, and healthy programs of which half look odd."""
