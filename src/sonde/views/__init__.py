"""Ways to look at a run. Nothing here records, judges or imports torch."""
