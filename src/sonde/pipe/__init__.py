"""Off the training thread: packets, the bounded ring of arenas, and the worker that feeds the sinks."""
