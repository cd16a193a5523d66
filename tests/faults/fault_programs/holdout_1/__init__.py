"""The first held-out set: written last, in another style than the programs in `dev`."""
