"""The session's profiler, with a clock that the test sets."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.debug import Profiler
from sonde.errors import OptionError
from sonde.testing import FakeClock


@pytest.fixture
def clock():
    return FakeClock(0.0)


@pytest.fixture
def profiler(clock):
    return Profiler(clock)


def test_timers_measure(profiler, clock):
    for seconds in (1.0, 3.0):
        profiler.start_timer("forward")
        clock.advance(seconds)
        assert profiler.end_timer("forward") == seconds
    found = profiler.get_statistics()["forward"]
    assert (found["count"], found["total"], found["mean"], found["longest"]) == (2, 4.0, 2.0, 3.0)


def test_a_timer_that_was_not_started_is_an_error(profiler):
    profiler.start_timer("a")
    with pytest.raises(OptionError, match=r"'b' was not started \(running: a\)"):
        profiler.end_timer("b")


def test_a_layer_that_takes_most_of_the_time_is_a_bottleneck(profiler):
    for name, seconds in {"a": 0.01, "b": 0.012, "c": 0.2, "d": 0.011}.items():
        profiler.record_layer_execution(name, "Linear", seconds, seconds * 2, 100, 10)
    (found,) = profiler.analyze_performance()
    assert (found.name, found.kind, found.severity) == ("c", "layer", "critical")
    assert found.share == pytest.approx(0.2 / 0.233)
    assert next(iter(profiler.get_layer_profiles())) == "c"
    assert profiler.suggestions()[0].startswith("Look into c (Linear)")


def test_even_layers_are_no_bottleneck_however_slow(profiler):
    for name in "ab":
        profiler.record_layer_execution(name, "Linear", 10.0)
    assert profiler.analyze_performance() == []


def test_memory_that_grows_is_reported_and_memory_that_settles_is_not(clock):
    growing, settled = Profiler(clock), Profiler(clock)
    for step in range(60):
        growing.record_memory(100 + 5 * step)
        settled.record_memory(100 + 20 * (1 - np.exp(-step / 3)))
    assert [item.kind for item in growing.analyze_performance()] == ["memory"]
    assert settled.analyze_performance() == []


def test_throughput(profiler):
    assert profiler.throughput() is None
    profiler.record_model_inference(8, 2.0, tokens=1000)
    profiler.record_model_inference(8, 2.0, tokens=1000)
    assert profiler.throughput() == {"samples_per_second": 4.0, "tokens_per_second": 500.0}


def test_operations_and_report(profiler):
    for name, seconds in {"matmul": 1.0, "add": 0.01, "relu": 0.01}.items():
        profiler.record_tensor_operation(name, seconds)
    report = profiler.generate_report()
    assert report["bottlenecks"][0]["name"] == "matmul"


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_an_impossible_time_is_reported(seconds):
    with pytest.raises(OptionError, match="'fc' cannot have taken"):
        Profiler().record_layer_execution("fc", "Linear", seconds)
