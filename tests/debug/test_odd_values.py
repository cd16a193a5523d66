"""Odd tensors and odd names: each is looked at rightly, or refused with what to do instead."""

from __future__ import annotations

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch

from sonde.debug import DebugSession, DebugVisualizer, GradientDebugger, TensorInspector
from sonde.errors import OptionError

DENSE = torch.tensor([[0.0, -1.5], [2.0, 0.25]])


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(DENSE, 0.25, 0, torch.qint8)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(DENSE.half(), id="half"),
        pytest.param(DENSE.bfloat16(), id="bfloat16"),
        pytest.param(DENSE.to(torch.float8_e4m3fn), id="float8"),
        pytest.param(DENSE.to_sparse(), id="sparse"),
        pytest.param(quantized(), id="quantized"),
        pytest.param(DENSE.t().contiguous().t(), id="strided"),
        pytest.param(torch.nn.Parameter(DENSE), id="parameter"),
        pytest.param(DENSE.numpy().astype(ml_dtypes.bfloat16), id="lent type"),
        pytest.param([row.clone().requires_grad_() for row in DENSE], id="list of tensors"),
        pytest.param([torch.tensor([0.0, -1.5]), [2.0, 0.25]], id="tensors and lists"),
    ],
)
def test_numbers_of_every_kind_are_read_as_what_they_are(tensor):
    inspector = TensorInspector()
    stats = inspector.get_tensor_info(inspector.inspect_tensor(tensor, "x")).stats
    assert (stats.shape, stats.min, stats.max, stats.mean) == ((2, 2), -1.5, 2.0, 0.1875)
    assert stats.l2_norm == pytest.approx(float(DENSE.norm()))
    gradients = GradientDebugger()
    gradients.record_gradient_flow("x", tensor)
    assert gradients.get_layer_history("x")[0].norm == pytest.approx(float(DENSE.norm()))


def test_an_eight_bit_type_keeps_its_name_its_size_and_its_units_in_the_last_place():
    inspector = TensorInspector()
    one = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    next_up = (one.view(torch.uint8) + torch.tensor([0, 1], dtype=torch.uint8)).view(torch.float8_e4m3fn)
    first, second = inspector.inspect_tensor(one, "x"), inspector.inspect_tensor(next_up, "x")
    stats = inspector.get_tensor_info(first).stats
    assert (stats.dtype, stats.memory_usage_bytes) == ("float8_e4m3fn", 2)
    assert inspector.compare_tensors(first, second).max_ulp == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_tensors_are_read_by_magnitude():
    inspector = TensorInspector()
    for dtype in (torch.complex64, torch.complex32):
        tensor = torch.tensor([3 + 4j, 0]).to(dtype).conj()
        stats = inspector.get_tensor_info(inspector.inspect_tensor(tensor, "z")).stats
        assert (stats.mean, stats.max, stats.zero_count) == (2.5, 5.0, 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_has_a_shape_and_no_statistics(shape):
    inspector = TensorInspector()
    info = inspector.get_tensor_info(inspector.inspect_tensor(torch.empty(shape), "x"))
    assert (info.stats.shape, info.stats.total_elements, info.stats.mean) == (shape, 0, None)
    assert info.distribution is None


def test_a_tensor_without_dimensions_is_one_number():
    inspector = TensorInspector()
    ids = [inspector.inspect_tensor(value, "x") for value in (torch.tensor(3.0), 3.0, np.float64(3.0))]
    assert {inspector.get_tensor_info(each).stats.mean for each in ids} == {3.0}
    assert inspector.compare_tensors(ids[0], ids[1]).worst_index == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(2, 3, device="meta"), r"'x'\) got a tensor \(2, 3\) on the meta device"),
        (
            torch.sparse_coo_tensor(torch.zeros(2, 1).long(), torch.ones(1), (1 << 20, 1 << 20), check_invariants=True),
            "4096.0 GiB",
        ),
        ((torch.zeros(2), torch.zeros(3)), "one by one"),
        ([[1.0], [1.0, 2.0]], "parts of different shapes"),
        (None, "got NoneType"),
        ("text", "got str"),
        ({"a": 1.0}, "got dict"),
    ],
    ids=["meta", "huge sparse", "tuple", "ragged", "none", "text", "dict"],
)
def test_what_holds_no_tensor_is_refused_with_a_way_out(value, message):
    with pytest.raises(OptionError, match=message):
        TensorInspector().inspect_tensor(value, "x")


def test_a_nested_tensor_is_to_be_handed_in_by_its_parts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(OptionError, match="unbind"):
        TensorInspector().inspect_tensor(nested, "x")


@pytest.mark.parametrize("name", ["../../etc", "a/b:c", "", "two\nlines", "ünï</script>", "a" * 500])
def test_any_name_comes_back_as_it_was_given(name, tmp_path):
    with DebugSession() as session:
        number = session.tensor_inspector.inspect_tensor([1.0, float("nan")], name, name, name)
        session.gradient_debugger.record_gradient_flow(name, [1.0])
        session.profiler.record_time(name, 1.0)
    info = session.tensor_inspector.get_tensor_info(number)
    assert (info.name, info.layer, info.operation) == (name, name, name)
    report = json.loads(session.report.save(tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["gradients"]["layers"][0]["layer"] == name
    assert name in report["performance"]["timers"]


def test_of_many_outliers_all_are_counted_and_the_farthest_are_named():
    values = np.zeros(10_000)
    values[:1000] = np.arange(1000) + 1
    inspector = TensorInspector()
    distribution = inspector.get_tensor_info(inspector.inspect_tensor(values, "x")).distribution
    assert distribution.num_outliers == 1000
    assert [outlier.value for outlier in distribution.outliers] == list(range(1000, 900, -1))


@pytest.mark.parametrize("draws", ["plot_tensor_distribution", "plot_activation_patterns"])
def test_figures_draw_odd_tensors_as_well_or_say_why_not(draws):
    pytest.importorskip("plotly", reason="plots need the view extra: pip install 'sonde[view]'")
    draw = getattr(DebugVisualizer(), draws)
    numbers = [draw("x", tensor).to_plotly_json()["data"] for tensor in (DENSE, DENSE.to_sparse(), DENSE.bfloat16())]
    assert repr(numbers[0]) == repr(numbers[1]) == repr(numbers[2])
    magnitudes = [draw("x", tensor).to_plotly_json()["data"] for tensor in (DENSE.abs(), DENSE.to(torch.complex64))]
    assert repr(magnitudes[0]) == repr(magnitudes[1]), "complex numbers by their magnitude"
    for nothing, message in ((torch.empty(2, device="meta"), "meta device"), (None, "got None"), ("run", "open_run")):
        with pytest.raises(OptionError, match=message):
            draw("x", nothing)
