"""Profile a training: scopes, operators, traces, and what makes a step slow."""
