"""Every example of the debug session's documentation, put into Python line by line."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.debug import (
    AlertSeverity,
    DebugConfig,
    DebugSession,
    DebugVisualizer,
    HookAction,
    HookBuilder,
    HookTrigger,
    ModelArchitectureInfo,
    ModelPerformanceMetrics,
    TerminalVisualizer,
    VisualizationConfig,
    debug_session,
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_basic_usage(capsys):
    async def main():
        session = debug_session()
        await session.start()

        tensor = np.linspace(0.0, 1.0, 1000)
        tensor_id = session.tensor_inspector.inspect_tensor(tensor, "my_tensor", "layer_1", "forward")

        gradients = [0.01, 0.02, 0.015, 0.008]
        session.gradient_debugger.record_gradient_flow("layer_1", gradients)

        report = await session.stop()
        print(f"Debug Summary: {report.summary()}")
        return session, tensor_id

    session, tensor_id = asyncio.run(main())
    assert session.tensor_inspector.get_tensor_info(tensor_id).stats.mean == pytest.approx(0.5)
    assert session.gradient_debugger.get_layer_history("layer_1")[0].norm == pytest.approx(
        np.linalg.norm([0.01, 0.02, 0.015, 0.008])
    )
    assert "total_issues=0" in capsys.readouterr().out


def test_advanced_configuration():
    config = DebugConfig(
        enable_tensor_inspection=True,
        enable_gradient_debugging=True,
        enable_model_diagnostics=True,
        enable_visualization=True,
        max_tracked_tensors=1000,
        max_gradient_history=200,
        output_dir="./debug_output",
        sampling_rate=0.1,
    )
    session = DebugSession(config)
    report = session.start().stop()
    assert sonde.open_run(report.run).status == "finished"


def test_using_debugging_hooks():
    session = debug_session()

    hook = (
        HookBuilder("Layer Monitor")
        .trigger(HookTrigger.EveryForward)
        .action(HookAction.InspectTensor)
        .layer_patterns(["attention.*"])
        .max_executions(100)
        .build()
    )
    hook_id = session.hooks.register_hook(hook)

    tensor_data = [1.0, 2.0, 3.0, 4.0]
    results = session.hooks.execute_hooks("attention_layer_1", tensor_data, [2, 2], True, None)

    assert [result.hook_id for result in results] == [hook_id]
    info = session.tensor_inspector.get_tensor_info(results[0].values[0])
    assert info.stats.shape == (2, 2)
    assert info.stats.mean == 2.5
    assert AlertSeverity.Critical == "critical"


def test_visualization():
    config = VisualizationConfig(output_directory="./plots")
    visualizer = DebugVisualizer(config)

    values = [1.0, 2.0, 1.5, 3.0, 2.5, 1.8, 2.2]
    visualizer.plot_tensor_distribution("weights", values, 10)

    steps = [0, 1, 2, 3, 4]
    gradients = [0.1, 0.08, 0.06, 0.04, 0.03]
    visualizer.plot_gradient_flow("layer1", steps, gradients)

    plot_names = visualizer.get_plot_names()
    dashboard = visualizer.create_dashboard(plot_names)
    assert len(plot_names) == 2
    assert "weights" in dashboard.read_text(encoding="utf-8")


def test_tensor_inspector(capsys):
    session = debug_session()
    my_tensor = torch.randn(4, 4)
    tensor_id = session.tensor_inspector.inspect_tensor(my_tensor, "layer_weights", "linear_1", "parameter")

    info = session.tensor_inspector.get_tensor_info(tensor_id)
    print(f"Tensor stats: {info.stats}")
    assert info.stats.l2_norm == pytest.approx(float(my_tensor.norm()), rel=1e-5)


def test_gradient_debugger(capsys):
    session = debug_session()
    gradient_values = [0.1, -0.2, 0.05]
    session.gradient_debugger.record_gradient_flow("transformer_block_0", gradient_values)

    analysis = session.gradient_debugger.analyze_gradient_flow()
    print(f"Gradient health: {analysis.overall_health}")
    assert "healthy" in capsys.readouterr().out


def test_model_diagnostics():
    session = debug_session()
    arch_info = ModelArchitectureInfo(
        total_parameters=125_000_000,
        trainable_parameters=125_000_000,
        model_size_mb=500.0,
        layer_count=24,
    )
    session.model_diagnostics.record_architecture(arch_info)

    metrics = ModelPerformanceMetrics(training_step=100, loss=0.5, accuracy=0.85, learning_rate=1e-4)
    session.model_diagnostics.record_performance(metrics)
    report = session.model_diagnostics.generate_report()
    assert report["architecture"]["layer_count"] == 24
    assert report["last_metrics"]["accuracy"] == 0.85


def test_performance_profiler():
    session = debug_session()
    profiler = session.profiler

    profiler.start_timer("layer_forward")
    duration = profiler.end_timer("layer_forward")

    forward_time, backward_time, memory_usage, parameter_count = 0.01, 0.02, 1024, 4096
    profiler.record_layer_execution(
        "transformer_block_0", "TransformerBlock", forward_time, backward_time, memory_usage, parameter_count
    )
    assert duration >= 0
    assert profiler.get_layer_profiles()["transformer_block_0"]["parameters"] == 4096


def test_terminal_visualization(capsys):
    terminal_viz = TerminalVisualizer(80, 24)
    values = np.random.default_rng(0).standard_normal(200)
    x_values, y_values = list(range(50)), np.exp(-np.arange(50) / 10)

    histogram = terminal_viz.ascii_histogram(values, 10)
    print(histogram)

    line_plot = terminal_viz.ascii_line_plot(x_values, y_values, "Training Loss")
    print(line_plot)
    out = capsys.readouterr().out
    assert "Training Loss" in out
    assert len(out.splitlines()) > 20


def test_integration_with_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    x = torch.randn(64, 8)
    train_dataloader = list(zip(x.chunk(4), (x[:, 0] > 0).long().chunk(4), strict=True))
    num_epochs = 4

    async def main():
        session = debug_session()
        await session.start()

        for _epoch in range(num_epochs):
            for step, (batch, labels) in enumerate(train_dataloader):
                output = model(batch)
                session.tensor_inspector.inspect_tensor(output, "model_output", None, "forward")

                loss = criterion(output, labels)
                optimizer.zero_grad()
                loss.backward()

                for name, param in model.named_parameters():
                    if param.grad is not None:
                        session.gradient_debugger.record_gradient_flow(name, param.grad)
                optimizer.step()

                metrics = ModelPerformanceMetrics(
                    training_step=step,
                    loss=loss.item(),
                    accuracy=float((output.argmax(1) == labels).float().mean()),
                    learning_rate=optimizer.param_groups[0]["lr"],
                    batch_size=len(batch),
                    timestamp=time.time(),
                )
                session.model_diagnostics.record_performance(metrics)

        return await session.stop()

    report = asyncio.run(main())
    assert report.tensors["total_inspected"] == 16
    assert {layer["layer"] for layer in report.gradients["layers"]} == {name for name, _ in model.named_parameters()}
    assert report.diagnostics["dynamics"]["steps"] == 16
