"""Sonde inside other programs: training frameworks, experiment trackers, and unmodified scripts."""
