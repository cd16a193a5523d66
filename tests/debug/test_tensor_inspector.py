"""The tensor inspector, against scipy and plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as scipy_stats

from sonde.debug.tensor_inspector import TensorInspector
from sonde.debug.tensor_stats import compare_arrays, compute_distribution, compute_stats
from sonde.errors import OptionError
from sonde.testing import FakeClock

FLOATS = hnp.arrays(np.float64, st.integers(2, 60), elements=st.floats(-1e6, 1e6))


@given(FLOATS)
def test_statistics_are_numpys(values):
    found = compute_stats(values)
    assert found.mean == pytest.approx(values.mean(), abs=1e-9)
    assert found.std == pytest.approx(values.std(ddof=1), abs=1e-9)
    assert (found.min, found.max, found.median) == (values.min(), values.max(), np.median(values))
    assert found.l1_norm == pytest.approx(np.abs(values).sum())
    assert found.l2_norm == pytest.approx(np.sqrt((values**2).sum()))
    assert found.zero_count == (values == 0).sum()


@given(FLOATS)
def test_the_distribution_is_scipys(values):
    found = compute_distribution(values)
    assert sum(found.counts) == len(values)
    assert found.percentiles["p95"] == pytest.approx(np.percentile(values, 95))
    if values.std() > max(1e-6 * np.abs(values).max(), 1e-60):
        assert found.skewness == pytest.approx(scipy_stats.skew(values), abs=1e-6)
        assert found.kurtosis == pytest.approx(scipy_stats.kurtosis(values), abs=1e-6)


def test_outliers_are_named_by_place_the_farthest_first():
    values = np.zeros((10, 10))
    values[:, ::2] = 1.0
    values[3, 7], values[9, 9] = 50.0, -100.0
    found = compute_distribution(values).outliers
    assert [(item.index, item.value) for item in found] == [((9, 9), -100.0), ((3, 7), 50.0)]


@pytest.mark.parametrize("values", [[], [np.nan, np.nan], [np.inf, -np.inf], [3.0], [1e308, -1e308]])
def test_odd_tensors_are_described_without_a_crash(values):
    inspector = TensorInspector()
    info = inspector.get_tensor_info(inspector.inspect_tensor(values, "odd"))
    assert info.stats.total_elements == len(values)
    assert info.stats.nan_count == sum(np.isnan(value) for value in values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_torch_type_is_taken(dtype):
    tensor = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    inspector = TensorInspector()
    info = inspector.get_tensor_info(inspector.inspect_tensor(tensor.requires_grad_(dtype.is_floating_point), "t"))
    assert info.stats.mean == pytest.approx(2 / 3)
    assert str(dtype).removeprefix("torch.") in info.stats.dtype


def test_compare_tensors_sees_the_tensors_and_not_their_means():
    inspector = TensorInspector()
    rng = np.random.default_rng(0)
    values = rng.standard_normal(1000)
    shuffled = rng.permutation(values)
    found = inspector.compare_tensors(inspector.inspect_tensor(values, "a"), inspector.inspect_tensor(shuffled, "b"))
    assert found.mse == pytest.approx(np.mean((values - shuffled) ** 2))
    assert found.correlation == pytest.approx(np.corrcoef(values, shuffled)[0, 1])
    assert found.cosine_similarity == pytest.approx(values @ shuffled / (values @ values))
    assert not found.equal


def test_comparison_across_types_counts_units_of_the_coarser():
    one = torch.tensor([1.0, 2.0, -3.0])
    near = torch.nextafter(torch.nextafter(one, torch.tensor(10.0)), torch.tensor(10.0))
    inspector = TensorInspector()
    ids = [inspector.inspect_tensor(tensor, "t") for tensor in (one, near, one.double() + 1e-12, one.bfloat16())]
    assert inspector.compare_tensors(ids[0], ids[1]).max_ulp == 2
    assert inspector.compare_tensors(ids[0], ids[2]).max_ulp == 0
    assert inspector.compare_tensors(ids[0], ids[3]).equal


def test_ulp_counts_across_zero():
    tiny = np.array([np.float32(1e-45)])
    assert compare_arrays(tiny, -tiny).max_ulp == 2
    assert compare_arrays(np.array([0.0]), np.array([-0.0])).max_ulp == 0


def test_different_shapes_are_an_error_that_names_them():
    inspector = TensorInspector()
    ids = [inspector.inspect_tensor(np.zeros(shape), "t") for shape in ((2, 3), (3, 2))]
    with pytest.raises(OptionError, match=r"\(2, 3\) and \(3, 2\)"):
        inspector.compare_tensors(*ids)


def test_nan_and_inf_raise_alerts_and_call_back():
    heard = []
    inspector = TensorInspector(on_alert=heard.append)
    inspector.inspect_tensor([1.0, np.nan, np.inf], "bad", "fc1")
    assert [(alert.kind, alert.severity) for alert in heard] == [("nan", "critical"), ("inf", "critical")]
    assert "bad in fc1: 1 of 3 elements are NaN" in heard[0].message
    inspector.enable_monitoring(False)
    inspector.inspect_tensor([np.nan], "bad")
    assert len(heard) == 2


def test_gradients_of_a_tensor_are_judged_by_their_norm():
    inspector = TensorInspector()
    name = inspector.inspect_tensor([1.0], "w")
    for gradient, kind in (([1e-12], "vanishing_gradient"), ([1e5], "exploding_gradient"), ([np.nan], "nan")):
        inspector.inspect_gradients(name, gradient)
        assert inspector.get_alerts()[-1].kind == kind
    count = len(inspector.get_alerts())
    inspector.inspect_gradients(name, [0.1])
    assert len(inspector.get_alerts()) == count


def test_looks_of_one_name_make_a_series_and_drift_is_seen():
    clock = FakeClock(0.0)
    inspector = TensorInspector(clock=clock)
    rng = np.random.default_rng(0)
    for step in range(30):
        clock.advance(1)
        inspector.inspect_tensor(rng.standard_normal(50) + 0.2 * step, "moving")
        inspector.inspect_tensor(rng.standard_normal(50), "still")
    assert [point[0] for point in inspector.get_time_series("moving")] == list(range(1, 31))
    assert [drift.name for drift in inspector.detect_advanced_anomalies()] == ["moving"]
    assert [alert.kind for alert in inspector.get_alerts()] == ["drift"]


def test_memory_is_bounded_by_number_and_by_bytes():
    inspector = TensorInspector(max_tracked_tensors=10, max_kept_bytes=4000)
    ids = [inspector.inspect_tensor(np.zeros(100), f"t{i}") for i in range(50)]
    assert len(inspector.get_all_tensors()) == 10
    assert inspector.memory_usage() <= 4000
    assert inspector.generate_report()["evicted"] == 40
    with pytest.raises(OptionError, match="max_tracked_tensors"):
        inspector.compare_tensors(ids[0], ids[-1])
    with pytest.raises(OptionError, match="max_kept_bytes"):
        inspector.compare_tensors(ids[-10], ids[-1])


def test_family_and_life_of_a_tensor():
    clock = FakeClock(0.0)
    inspector = TensorInspector(clock=clock)
    parent, child = inspector.inspect_tensor([1.0], "x"), inspector.inspect_tensor([2.0], "y")
    inspector.track_dependency(parent, child, "mul")
    clock.advance(5)
    inspector.record_lifecycle_event(child, "freed")
    found = inspector.perform_advanced_analysis(child)
    assert found["parents"] == [parent]
    assert found["events"] == [{"timestamp": 0.0, "event": "created"}, {"timestamp": 5.0, "event": "freed"}]


def test_words_are_no_tensor():
    with pytest.raises(OptionError, match="takes a tensor, an array or a list of numbers"):
        TensorInspector().inspect_tensor(["a"], "words")
