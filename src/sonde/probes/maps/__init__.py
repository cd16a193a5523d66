"""Maps of what layers compute: attention, Grad-CAM, features, statistics per sample."""
