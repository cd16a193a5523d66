"""The third held-out set: questions people ask in forums."""
