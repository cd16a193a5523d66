"""Model diagnostics: the right sign, real validation curves, a score that can be taken apart."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from torch import nn

from sonde.debug import (
    LayerActivationStats,
    ModelDiagnostics,
    ModelPerformanceMetrics,
    analyze_attention,
    analyze_weights,
    describe_architecture,
    receptive_field,
)
from sonde.errors import OptionError


def recorded(losses, **curves):
    diagnostics = ModelDiagnostics()
    for step, loss in enumerate(losses):
        more = {name: values[step] for name, values in curves.items()}
        diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, loss=float(loss), **more))
    return diagnostics


def test_a_falling_loss_is_converging_and_a_rising_one_diverging():
    falling = recorded(np.linspace(2, 1, 40)).analyze_training_dynamics()
    rising = recorded(np.linspace(1, 2, 40)).analyze_training_dynamics()
    assert (falling.convergence_status, rising.convergence_status) == ("converging", "diverging")
    assert falling.learning_efficiency == pytest.approx(0.5, abs=0.1)
    assert "lower the learning rate" in rising.recommendations[0]


def test_overfitting_is_detected_from_validation_losses_only():
    train = np.exp(-np.arange(20) / 6)
    validation = 0.5 + 0.05 * np.abs(np.arange(20) - 8)
    assert recorded(train, validation_loss=validation).analyze_training_dynamics().fit == "overfitting"
    assert recorded(train).analyze_training_dynamics().fit == "unknown"


def test_health_is_the_doctors_and_moves_with_what_was_found():
    good = recorded(np.exp(-np.arange(40) / 20)).assess_health()
    bad = recorded(np.exp(np.arange(40) / 8)).assess_health()
    broken = recorded([*np.ones(20), np.nan]).assess_health()
    assert (good.score, good.status, good.findings) == (1.0, "healthy", ())
    assert (bad.status, broken.status) == ("warning", "critical")
    assert good.score > bad.score > broken.score
    assert good.parts == {"training": 1.0}


def test_without_data_health_is_unknown():
    health = ModelDiagnostics().assess_health()
    assert (health.score, health.status) == (None, "unknown")


def test_alerts_of_one_kind_do_not_silence_other_layers():
    diagnostics = ModelDiagnostics()
    for name in ("a", "b", "a"):
        diagnostics.record_layer_stats(
            LayerActivationStats(layer_name=name, mean_activation=0.1, dead_neurons_ratio=0.95)
        )
    assert [(alert.kind, alert.layer) for alert in diagnostics.get_alerts()] == [
        ("dead_neurons", "a"),
        ("dead_neurons", "b"),
    ]
    health = diagnostics.assess_health()
    assert health.parts["activations"] < 1
    assert health.status == "warning"


def test_degradation_and_memory_growth_are_reported():
    n = 60
    accuracy = [0.5 + 0.01 * i for i in range(30)] + [0.4] * 30
    memory = [100.0 + 5 * i for i in range(n)]
    diagnostics = recorded(np.ones(n), accuracy=accuracy, memory_usage_mb=memory)
    assert {alert.kind for alert in diagnostics.get_alerts()} == {"performance_degradation", "memory_growth"}
    steady = recorded(np.ones(n), accuracy=[0.8] * n, memory_usage_mb=[100.0] * n)
    assert steady.get_alerts() == []


def test_an_architecture_is_found_from_the_module():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    model[0].weight.requires_grad_(False)
    info = describe_architecture(model)
    assert info.total_parameters == sum(p.numel() for p in model.parameters())
    assert info.total_parameters - info.trainable_parameters == 36
    assert info.layer_types == {"Conv2d": 1, "BatchNorm2d": 1, "ReLU": 1, "Flatten": 1, "Linear": 1}
    assert info.receptive_field == (3, 3)


def test_the_receptive_field_is_what_gradients_reach():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(2, 1, (3, 5), dilation=(1, 2))),
    )
    x = torch.randn(1, 1, 65, 65, requires_grad=True)
    torch.nn.init.constant_(model[3][0].weight, 1.0)
    torch.nn.init.constant_(model[0].weight, 1.0)
    model[2] = nn.AvgPool2d(2)  # a maximum hides where its gradient could have gone
    out = model[:1](x).abs()
    out = model[3](model[2](out))
    out[0, 0, 2, 2].backward()
    rows, columns = torch.nonzero(x.grad[0, 0], as_tuple=True)
    seen = (int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1)
    assert receptive_field(model) == seen


def test_a_model_that_is_not_a_chain_has_no_receptive_field():
    assert receptive_field(nn.TransformerEncoderLayer(8, 2)) is None
    assert receptive_field(nn.Sequential(nn.Linear(2, 2))) is None


def test_weights_are_analysed_by_unit():
    weight = np.random.default_rng(0).standard_normal((8, 16))
    weight[3] = 0
    weight[5] = 2 * weight[1]
    found = analyze_weights(torch.tensor(weight), "fc")
    assert found.dead == (3,)
    assert found.twins == ((1, 5),)
    assert found.largest_norm == pytest.approx(np.linalg.norm(weight, axis=1).max())
    assert analyze_weights(np.outer(np.ones(4), np.arange(1.0, 6.0))).effective_rank == pytest.approx(1.0)
    with pytest.raises(OptionError, match="two dimensions"):
        analyze_weights([1.0, 2.0])


def test_attention_heads_are_distinguished():
    tokens = 16
    diagonal = np.eye(tokens)
    uniform = np.full((tokens, tokens), 1 / tokens)
    first = np.zeros((tokens, tokens))
    first[:, 0] = 1.0
    found = analyze_attention(np.stack([diagonal, uniform, first, uniform])[None])
    assert [head.pattern for head in found.heads] == ["diagonal", "uniform", "focused", "uniform"]
    assert [head.entropy for head in found.heads] == pytest.approx([0, 1, 0, 1], abs=1e-9)
    assert (found.heads[2].most_attended, found.heads[2].most_attended_share) == (0, 1.0)
    assert found.redundant == ((1, 3),)
    with pytest.raises(OptionError, match="add up to 1"):
        analyze_attention(np.ones((1, 2, 4, 4)))


def test_the_report_is_plain():
    report = recorded(np.linspace(2, 1, 40)).generate_report()
    assert report["dynamics"]["convergence_status"] == "converging"
    assert report["health"]["status"] == "healthy"


def test_numbers_may_be_tensors_and_keep_no_graph_alive():
    weight = torch.ones(1, requires_grad=True)
    when = datetime(2026, 1, 1, tzinfo=UTC)
    metrics = ModelPerformanceMetrics(
        training_step=1, loss=(weight * 2).sum(), accuracy=np.float32(0.5), timestamp=when
    )
    assert (type(metrics.loss), metrics.loss, metrics.accuracy, metrics.timestamp) == (
        float,
        2.0,
        0.5,
        when.timestamp(),
    )
    with pytest.raises(OptionError, match="loss takes a number; got 'low'"):
        ModelPerformanceMetrics(training_step=1, loss="low")


def test_records_of_another_kind_are_reported():
    diagnostics = ModelDiagnostics()
    with pytest.raises(OptionError, match=r"takes a ModelPerformanceMetrics\(...\); got dict"):
        diagnostics.record_performance({"loss": 1.0})
    with pytest.raises(OptionError, match=r"takes a ModelArchitectureInfo\(...\); got Linear"):
        diagnostics.record_architecture(torch.nn.Linear(2, 2))
