"""The fourth held-out set: faults as people make them."""
