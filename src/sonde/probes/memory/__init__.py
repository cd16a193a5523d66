"""Memory of a training: scopes, leaks and what holds on to it."""
