"""Programs to tune rules on."""
