"""Questions about a taped step: exact relations between what it computes, which rules report."""
