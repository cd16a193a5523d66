"""CUDA events without a device: they refuse what the driver refuses, and take their time from a clock."""

from __future__ import annotations

import contextlib

import torch

from sonde.probes.profile import cuda_timing, module_times


class FakeCuda:
    """Devices whose work is done at once, unless they are told to lag."""

    def __init__(self, clock):
        self.clock = clock
        self.current = 0
        self.capturing: set[int] = set()
        self.lagging: set[int] = set()
        self.events: list[Event] = []

    def install(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device.index)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.on)
        for user in (cuda_timing, module_times):
            monkeypatch.setattr(user, "is_capturing", lambda: self.current in self.capturing)
        for user in (cuda_timing, module_times):  # there may be a real driver, which nobody has started
            monkeypatch.setattr(user, "beside_captures", contextlib.nullcontext)

    def event(self, *, enable_timing):
        assert enable_timing
        self.events.append(Event(self))
        return self.events[-1]

    @contextlib.contextmanager
    def on(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before


class Event:
    def __init__(self, cuda):
        self.cuda, self.index, self.time = cuda, None, None

    def record(self, stream):
        assert self.index in (None, stream), "an event of one device was put into a stream of another"
        assert stream not in self.cuda.capturing, "an event was put into a graph"
        self.index, self.time = stream, self.cuda.clock()

    def query(self):
        assert not self.cuda.capturing, "the driver ends a capture at this question"
        return self.index not in self.cuda.lagging

    def elapsed_time(self, other):
        assert self.index == other.index
        return (other.time - self.time) * 1e3
