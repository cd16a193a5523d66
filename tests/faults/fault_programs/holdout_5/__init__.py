"""Fifth hold-out: faults from real posts, each with the address it was made after, and healthy programs that look odd."""
