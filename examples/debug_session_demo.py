"""A debug session from start to end: on a model that trains, and on values that are passed in.

    python examples/debug_session_demo.py [--output runs/debug-demo]

The network has dead units, and one batch is spoilt on purpose, so that there is something to find. It runs in seconds
on a CPU. Two dashboards (open them in a browser) and two reports are left in the output folder.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from sonde.debug import (
    DebugConfig,
    DebugSession,
    HookAction,
    HookBuilder,
    HookCondition,
    HookTrigger,
    ModelPerformanceMetrics,
    TerminalVisualizer,
    analyze_weights,
    debug_session,
    debug_session_with_config,
)

SPOILT_STEP = 60


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[0].weight[:16] = 0  # a quarter of the first layer does nothing
        model[0].bias[:16] = -1
    return model


def train(
    session: DebugSession, model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int = 120
) -> list[float]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(1, steps + 1):
        chosen = torch.randint(len(x), (64,), generator=generator)
        batch = x[chosen] * (30.0 if step == SPOILT_STEP else 1.0)
        loss = nn.functional.cross_entropy(model(batch), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        losses.append(loss.item())
    return losses


def large_activations() -> Any:
    """Return a hook that reports outputs beyond 30 and saves the first of them."""
    large = HookTrigger.Conditional(HookCondition.Statistic("max", ">", 30.0))
    builder = HookBuilder("large activations").trigger(large).layer_patterns(["glob:[024]"]).max_executions(1)
    return builder.action(HookAction.Alert("outputs beyond 30", "warning")).action(HookAction.SaveSnapshot()).build()


def watch_a_model(output: Path) -> None:
    print("1. A session attached to a model\n")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with debug_session(model, optimizer, DebugConfig.deep(output / "attached")) as session:
        session.on_alert(lambda alert: print(f"  alert at step {session.step}: {alert['message']}"))
        session.hooks.register(large_activations())
        losses = train(session, model, optimizer)
    report = session.report
    assert report is not None
    print("\n" + TerminalVisualizer(78, 12).ascii_line_plot(losses, title="Training loss"))
    flow = session.gradient_debugger.analyze_gradient_flow()
    print(f"\n  gradient health: {flow.overall_health} (score {flow.score:.2f})")
    for units in flow.dead_units:
        print(f"  {units.num_dead} of {units.units} units of layer {units.layer} were never active")
    health = session.model_diagnostics.assess_health()
    print(f"  model health: {health.status} (score {health.score:.2f})")
    dynamics = session.model_diagnostics.analyze_training_dynamics()
    print(f"  the loss is {dynamics.convergence_status}, {dynamics.learning_efficiency:.0%} of it is gone")
    evaluation = session.model_diagnostics.evaluation
    assert evaluation is not None
    print(f"  parameter efficiency: {evaluation.parameter_efficiency:.0%}, bottleneck: {evaluation.bottleneck}")
    slowest = next(iter(session.profiler.get_layer_profiles().items()))
    print(
        f"  slowest layer: {slowest[0]} ({slowest[1]['type']}), {1e3 * slowest[1]['forward']['mean']:.2f} ms a forward"
    )
    show_summary(report)


def hand_in_values(output: Path) -> None:
    print("\n2. A session without a model: values are passed in\n")
    config = DebugConfig(
        output_dir=output / "handed-in", enable_visualization=True, layers=["block.*"], sampling_rate=0.5
    )
    rng = np.random.default_rng(0)
    with debug_session_with_config(config) as session:
        session.on_alert(lambda alert: print(f"  alert: {alert['message']}"))
        for step in range(60):
            gradient = 0.01 * rng.standard_normal(200) * (1e4 if step == 50 else 1)
            session.gradient_debugger.record_gradient_flow("block.0", gradient)
            session.gradient_debugger.record_gradient_flow("head", gradient)  # not selected by `layers`
            session.tensor_inspector.inspect_tensor(rng.standard_normal(500) + 0.05 * step, "scores", "block.0")
            session.profiler.start_timer("metrics")
            session.model_diagnostics.record_performance(
                ModelPerformanceMetrics(
                    training_step=step,
                    loss=2.0 * 0.97**step + (20 if step == 45 else 0),
                    accuracy=0.9 - 0.5 * 0.95**step,
                    throughput_samples_per_sec=1000.0 if step < 40 else 500.0,
                )
            )
            session.profiler.end_timer("metrics")
        first, second = session.tensor_inspector.get_tensors_by_layer("block.0")[:2]
        compared = session.tensor_inspector.compare_tensors(first.id, second.id)
        print(f"\n  two looks at 'scores' differ by at most {compared.max_absolute_difference:.2f}")
    print(
        f"  effective rank of a random 8 x 8 weight: {analyze_weights(rng.standard_normal((8, 8))).effective_rank:.1f}"
    )
    assert session.report is not None
    show_summary(session.report)
    session.clear()  # a long training does this now and then, while it runs
    print(f"  after clear() {len(session.tensor_inspector.get_all_tensors())} tensors are remembered")


def show_summary(report: Any) -> None:
    summary = report.summary()
    print(f"\n  {summary.total_issues} issues, {summary.critical_issues} critical. What to do:")
    for text in summary.recommendations[:6]:
        print(f"  - {text}")
    print(f"  run and report: {report.run}\n  dashboard: {report.dashboard}")


def main(output: Path = Path("runs/debug-demo")) -> None:
    watch_a_model(output)
    hand_in_values(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/debug-demo"))
    logging.getLogger("sonde").setLevel(logging.ERROR)  # alerts are logged too; here a listener prints them
    main(parser.parse_args().output)
