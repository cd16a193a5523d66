"""Training in several processes: which rank this is, and how ranks agree."""
