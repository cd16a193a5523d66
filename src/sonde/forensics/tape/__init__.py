"""Record one training step operation by operation; see `sonde.core.tape` for what is recorded."""
