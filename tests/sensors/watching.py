"""A session on a fresh run with everything it records in memory."""

from __future__ import annotations

import sonde
from sonde.core.facts import Facts
from sonde.testing import MemorySink


class Watching:
    """Faults of Sonde are raised, not isolated. After the `with` block, readings can be looked up by key."""

    def __init__(self, path, model, optimizer=None, **options):
        self.sink = MemorySink()
        # Only what is under test: the statistics of tensors have tests of their own.
        options = {"on_error": "raise", "what": ["gradients"], "histogram": False, **options}
        self.session = sonde.watch(model, optimizer, run=path / "run", **options)
        self.session.subscribe(self.sink)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.session.__exit__(*exc)

    def means(self, key):
        """Return the mean of each reading by step."""
        return {step: reading.mean for step, reading in self.sink.readings(key).items()}

    def __getitem__(self, key):
        return self.sink.readings(key)

    @property
    def keys(self):
        return self.sink.keys

    @property
    def facts(self):
        """The facts as stated last."""
        return Facts.from_json([event for event in self.sink.events if event.event_type == "facts"][-1].data)
