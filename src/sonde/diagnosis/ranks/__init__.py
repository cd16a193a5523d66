"""What the ranks of a run show when they are compared."""
