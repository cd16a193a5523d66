"""The second held-out set, written as an outside user would by an author who had seen neither rules nor programs."""
