"""The telemetry of a run on disk: journals that grow step by step, and the segments they are sealed into."""
