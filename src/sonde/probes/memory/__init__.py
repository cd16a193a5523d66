"""Memory of a training: scopes, leaks, and which objects keep memory."""
