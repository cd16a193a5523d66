"""One table of curves: every interface says what the doctor says of the same numbers, or names the window it looks at.

The doctor's answer is `sonde.diagnose` of a run written with the curves. Each interface is compared with the doctor's
answer to what that interface knows: one that never sees the weights is compared with a run without them. What an
interface reports beyond that must be about a stretch that it names: "at this step only", "at step 60", "over the last
40 steps".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tests.views.web.asking import client_of

import sonde
from sonde.analysis import ModelOrder, summarise_layers, summarise_sites
from sonde.core import schema, signals
from sonde.debug import (
    GradientDebugger,
    LayerActivationStats,
    ModelDiagnostics,
    ModelPerformanceMetrics,
    TensorInspector,
)
from sonde.diagnosis.dynamics import classify
from sonde.diagnosis.judgement import VERDICTS, Curves, gradient_now, health, judge_curves, loss_now, units_now
from sonde.pytorch_debugging import PyTorchDebugger, TrainingLogger
from sonde.records import Block, Finding, RunHeader, Site
from sonde.store import RunWriter, open_run

N = 60
NAN, INF = math.nan, math.inf
LAYER = "fc.weight"
FALLING = [2.3 - 0.03 * step for step in range(N)]
FLAT = [2.3] * N
WINDOW = re.compile(r"\bonly\b|at step \d+|(over|in) the last \d+ (steps|values)|in what was looked at")
"""How an interface says that it does not speak of the whole run."""


def noise(scale, seed=0, n=N):
    return np.exp(scale * np.random.default_rng(seed).standard_normal(n))


@dataclass(frozen=True)
class Gradients:
    """Gradient norms by layer, the norm of every weight if it is known, and what the doctor must say of them."""

    norms: Mapping[str, Sequence[float]]
    weights: float | None = None
    losses: Sequence[float] = ()
    expected: dict[str, str] = field(default_factory=dict)
    now: str = "healthy"
    """What `gradient_now` must say of the last step of the first layer, given the steps before and the weights."""

    @property
    def curves(self) -> Curves:
        weights = {} if self.weights is None else {name: [self.weights] * len(v) for name, v in self.norms.items()}
        return Curves(losses=self.losses, gradients=self.norms, parameters=weights, finished=True)


def one(norms, expected="", *, now="healthy", weights=None, losses=()):
    return Gradients({LAYER: list(norms)}, weights, losses, {LAYER: expected} if expected else {}, now)


def deep(losses):
    norms = {f"layers.{at}.weight": [10.0 ** (at - 6)] * N for at in range(6)}
    vanishing = {f"layers.{at}.weight": "vanishing" for at in range(3)} if losses is FLAT else {}
    return Gradients(norms, 1.0, losses, vanishing)


GRADIENTS = {
    "steady at 1": one([1.0] * N),
    "steady at 50": one([50.0] * N, weights=1.0),
    "steady at 2,000, weights of norm 1": one([2000.0] * N, "exploding", now="exploding", weights=1.0),
    "steady at 2,000, weights not known": one([2000.0] * N),
    "steady at 2,000, weights of norm 100": one([2000.0] * N, weights=100.0),
    "steady at 30,000, weights of norm 1": one([3e4] * N, "exploding", now="exploding", weights=1.0),
    "steady at 1e-7": one([1e-7] * N, weights=1.0),
    "steady at 5e-14": one([5e-14] * N, "vanishing", now="vanishing", weights=1.0),
    "steady at 5.7e-14, weights not known": one([5.7e-14] * N, "vanishing", now="vanishing"),
    "steady at 5e-14 while the loss falls": one([5e-14] * N, now="vanishing", weights=1.0, losses=FALLING),
    "last step 8 times as large": one([1.0] * (N - 1) + [8.0]),
    "last step 15 times as large": one([1.0] * (N - 1) + [15.0]),
    "last step 150 times as large": one([1.0] * (N - 1) + [150.0], now="exploding"),
    "last three steps 150 times as large": one([1.0] * (N - 3) + [150.0] * 3, "exploding", now="exploding"),
    "1,000 times as large, and it stays": one([1.0] * (N - 10) + [1000.0] * 10, "exploding", now="exploding"),
    "doubling at every step": one([1.0] * (N - 7) + [2.0**at for at in range(1, 8)], "exploding", now="exploding"),
    "one step 150 times as large, long ago": one([1.0] * 30 + [150.0] + [1.0] * 29),
    "decay over depth, flat loss": deep(FLAT),
    "decay over depth, falling loss": deep(FALLING),
    "NaN at the end": one([1.0] * (N - 3) + [NAN] * 3, "non-finite", now="non-finite"),
    "NaN once": one([1.0] * 30 + [NAN] + [1.0] * 29, "non-finite"),
    "infinite at the end": one([1.0] * (N - 1) + [INF], "non-finite", now="non-finite"),
    "zero from the start": one([0.0] * N, "vanishing", now="vanishing"),
    "zero for the last 20 steps": one([1.0] * (N - 20) + [0.0] * 20, "vanishing", now="vanishing"),
    "one layer of five is zero": Gradients(
        {f"l{at}.weight": [0.0 if at == 2 else 1.0] * N for at in range(5)}, None, FLAT, {"l2.weight": "vanishing"}
    ),
    "faded for the last 20 steps": one([1.0] * (N - 20) + [1e-5] * 20, "vanishing", now="vanishing"),
    "faded while the loss falls": one([1.0] * (N - 20) + [1e-5] * 20, now="vanishing", losses=FALLING),
    "shrinking slowly while the loss falls": one(0.97 ** np.arange(N), losses=FALLING),
    "oscillating by 80 %": one(1.0 + 0.8 * np.where(np.arange(N) % 2, 1, -1)),
    "very noisy": one(noise(0.7)),
    "passing through zero once": one([*[1.0] * 30, 1e-9, *[1.0] * 29]),
}
LOSSES = {
    "improving": (2.3 * np.exp(-1.5 * np.arange(160) / 160) * noise(0.03, n=160), ""),
    "stuck": (2.303 * noise(0.01, n=160), "stuck"),
    "fell, then rose far": ([2.0 - 0.02 * step for step in range(80)] + [9.0] * 40, "diverging"),
    "rising": (0.5 * np.exp(3 * np.arange(160) / 160) * noise(0.05, n=160), "diverging"),
    "ends in NaN": ([*(2 * np.exp(-np.arange(50) / 50)), NAN], "non-finite"),
    "ends infinite": ([2.0] * 30 + [INF], "non-finite"),
    "swings at every step": (1.0 + 0.6 * np.where(np.arange(160) % 2, 1, -1), "unstable, stuck"),
    "swings regularly": (1.0 + 0.4 * np.sin(np.arange(160) / 2), "unstable"),
    "one spike": (2.0 * np.exp(-np.arange(120) / 120) * np.where(np.arange(120) == 80, 10.0, 1.0), "unstable"),
    "too short to tell": ([2.0, 2.1, 1.9, 2.0, 2.0], ""),
    "NaN from the first step": ([NAN], "non-finite"),
}
UNITS = {
    "hardly any unit is dead": ("dead", 0.02, ""),
    "a sixth of the units is dead": ("dead", 0.15, ""),
    "nearly all units are dead": ("dead", 0.95, "dead"),
    "some inputs are saturated": ("saturated", 0.3, ""),
    "most inputs are saturated": ("saturated", 0.8, "saturated"),
}
OUTPUTS = {
    "steady at 1": ([1.0] * N, ""),
    "steady at 5,000": ([5000.0] * N, ""),
    "growing to 1e6": ([1.26**step for step in range(N)], "exploding"),
    "100 times as large at the last step": ([1.0] * (N - 1) + [100.0], ""),
}


def write(path, curves: Curves):
    """Write the curves as a run; nobody judges it."""
    groups = [
        ("scalar", "", {"loss": curves.losses} if len(curves.losses) else {}),
        ("parameter", "", curves.parameters),
        ("gradient", "", curves.gradients),
        ("output", "", curves.outputs),
        ("vital", signals.part_of(signals.EVER_ACTIVE), curves.active),
        ("vital", signals.part_of(signals.UNIT_SAMPLES), curves.samples),
        ("vital", signals.part_of(signals.SATURATED), curves.saturated),
    ]
    sites, values = [], []
    for quantity, part, group in groups:
        for name, curve in group.items():
            shape = (1, 1) if quantity in ("parameter", "gradient") else ()
            sites.append(Site(id=len(sites), name=name, quantity=quantity, part=part, shape=shape))
            values.append([float(value) for value in curve])
    writer = RunWriter(path, RunHeader(schema_version=schema.SCHEMA_VERSION, created=0.0, sonde_version="0.1.0"))
    writer.take_sites(sites)
    for at in range(max(map(len, values))):
        here = [number for number, curve in enumerate(values) if at < len(curve)]
        rows = schema.rows_of_values(np.array([values[number][at] for number in here]))
        writer.take_block(
            Block(
                step=at + 1,
                time=float(at),
                sites=np.array(here, np.uint32),
                rows=rows,
                bins=np.zeros((len(here), schema.NUM_BINS), np.uint64),
                binned=np.zeros(len(here), np.bool_),
            )
        )
    writer.final_state = "finished"
    writer.close()
    return open_run(path)


def words(findings: Sequence[Finding]) -> set[str]:
    """Return the verdicts of findings, including those of the symptoms folded under them."""
    kinds = {kind for finding in findings for kind in (finding.kind, *finding.explains)}
    return {VERDICTS[kind] for kind in kinds if kind in VERDICTS}


def by_layer(findings: Sequence[Finding]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in findings:
        for site in finding.sites:
            found.setdefault(site, set()).update(words([finding]))
    return found


def says_another_window(text: str) -> bool:
    return WINDOW.search(text) is not None


# ---------------------------------------------------------------- the doctor


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_doctor_says_what_the_table_says_of_gradients_from_files_and_from_curves(tmp_path, name):
    case = GRADIENTS[name]
    diagnosis = sonde.diagnose(write(tmp_path / "run", case.curves))
    judged = judge_curves(case.curves)
    assert words(diagnosis.findings) == set(case.expected.values())
    found = by_layer(diagnosis.findings)
    assert {layer: word for layer, word in case.expected.items() if word in found.get(layer, ())} == case.expected
    assert [finding.to_json() for finding in judged.findings] == [finding.to_json() for finding in diagnosis.findings]


@pytest.mark.parametrize("name", GRADIENTS)
def test_one_step_is_judged_with_the_same_bands_and_says_that_it_is_one_step(name):
    case = GRADIENTS[name]
    norms = next(iter(case.norms.values()))
    moment = gradient_now(norms[-1], norms[:-1], weight=case.weights)
    first = next(iter(case.norms))
    if len(case.norms) == 1:
        assert moment.verdict == case.now
    if moment.is_wrong and case.expected.get(first) != moment.verdict:
        assert says_another_window(moment.words)
    assert not moment.is_wrong or says_another_window(moment.words)


@pytest.mark.parametrize("name", LOSSES)
def test_the_doctor_says_what_the_table_says_of_losses_and_so_does_their_classification(tmp_path, name):
    losses, expected = LOSSES[name]
    curves = Curves(losses=losses, finished=True)
    diagnosis = sonde.diagnose(write(tmp_path / "run", curves))
    assert words(diagnosis.findings) == set(expected.split(", ") if expected else ())
    assert words(judge_curves(curves).findings) == words(diagnosis.findings)
    state = classify(np.asarray(losses, np.float64)).state
    if len(losses) > 1:
        assert (state == "non-finite") is (expected == "non-finite")
    assert (state == "diverging") is (expected == "diverging") or state == "unknown"
    if state == "oscillating":
        assert "unstable" in expected
    moment = loss_now(losses[-1], losses[:-1])
    assert (moment.verdict == "non-finite") is (expected == "non-finite")
    if moment.verdict == "non-finite":
        assert ("NaN" if math.isnan(losses[-1]) else "infinite") in moment.words
        assert ("NaN" if math.isnan(losses[-1]) else "infinite") in diagnosis.findings[0].cause


@pytest.mark.parametrize("name", UNITS)
def test_the_doctor_says_what_the_table_says_of_units(tmp_path, name):
    kind, share, expected = UNITS[name]
    curves = unit_curves(kind, share)
    diagnosis = sonde.diagnose(write(tmp_path / "run", curves))
    assert words(diagnosis.findings) == ({expected} if expected else set())
    assert words(judge_curves(curves).findings) == words(diagnosis.findings)
    now = units_now(dead=share) if kind == "dead" else units_now(saturated=share)
    assert now.verdict == (expected or "healthy")


def unit_curves(kind, share):
    if kind == "saturated":
        return Curves(saturated={"act": [share] * 12}, finished=True)
    samples = [1000.0 * look for look in range(1, 13)]
    return Curves(active={"act": [1 - share] * 12}, samples={"act": samples}, finished=True)


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_doctor_says_what_the_table_says_of_outputs(tmp_path, name):
    largest, expected = OUTPUTS[name]
    run = write(tmp_path / "run", Curves(outputs={"fc": largest}, finished=True))
    assert words(sonde.diagnose(run).findings) == ({expected} if expected else set())
    [row] = summarise_sites(run, run.sites)
    assert (row.mark.level != "fine") is bool(expected)


@pytest.mark.parametrize("severity", ["info", "warning", "critical"])
@pytest.mark.parametrize("others", [0, 1, 50])
def test_health_with_a_critical_finding_is_never_healthy(severity, others):
    finding = Finding(kind="x", severity=severity, confidence=None, step=1, last_step=1)
    rating = health([finding, *[replace(finding, severity="info")] * others])
    assert rating.word == ("healthy" if severity == "info" else severity)
    limits = {"info": (0.7, 1.0), "warning": (0.4, 0.7), "critical": (0.0, 0.4)}
    low, high = limits[severity]
    assert low <= rating.score <= high


# ---------------------------------------------------------------- tables and pages


@pytest.mark.parametrize("name", GRADIENTS)
def test_tables_and_the_web_mark_what_the_doctor_names_and_single_steps_with_their_number(tmp_path, name):
    case = GRADIENTS[name]
    run = write(tmp_path / "run", case.curves)
    found = by_layer(sonde.diagnose(run).findings)
    rows = {row.site.key: row for row in summarise_sites(run, run.sites)}
    client = client_of(tmp_path)
    for layer in case.norms:
        mark = rows[f"{layer}:gradient"].mark
        if layer in found:
            assert mark.level != "fine"
            assert any(word in mark.reason for word in found[layer]), mark
        elif mark.level != "fine":
            assert says_another_window(mark.reason) or mark.reason.startswith("all zero"), mark
        answer = client.get(f"/api/run/0-run/site?site={layer}:gradient").json()
        assert {VERDICTS[kind] for kind in answer["findings"] if kind in VERDICTS} == found.get(layer, set())
    layers = summarise_layers(rows.values(), ModelOrder(run.header, run.sites))
    if found:
        assert layers[0].worst.site.name in found


def test_nothing_is_marked_in_a_healthy_run(tmp_path):
    """Layers of very different sizes, noise, a falling loss, one odd batch: nothing to say."""
    gradients = {f"l{at}.weight": 10.0 ** (at % 4 - 2) * noise(0.4, at, 300) for at in range(20)}
    gradients["l3.weight"][150] *= 30
    parameters = {name: [1.0] * 300 for name in gradients}
    losses = 2.3 * np.exp(-2 * np.arange(300) / 300) * noise(0.05, n=300)
    run = write(tmp_path / "run", Curves(losses=losses, gradients=gradients, parameters=parameters))
    assert sonde.diagnose(run).findings == ()
    assert [row.site.key for row in summarise_sites(run, run.sites) if row.mark.level != "fine"] == []


# ---------------------------------------------------------------- sonde.debug

PROBLEMS = {"nonfinite": "non-finite", "no_gradient": "vanishing", "exploding": "exploding", "vanishing": "vanishing"}


def gradient_debugger(case: Gradients) -> GradientDebugger:
    debugger = GradientDebugger()
    if len(case.losses):
        debugger.known_losses = lambda: dict(enumerate(case.losses, 1))
    for at in range(N):
        for layer, norms in case.norms.items():
            debugger.record_gradient_flow(layer, float(norms[at]), 0.0, 1.0, step=at + 1)
    return debugger


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_debugger_says_what_the_doctor_says(name):
    case = GRADIENTS[name]
    doctor = judge_curves(replace(case.curves, parameters={}, finished=False))  # it never sees the weights
    debugger = gradient_debugger(case)
    analysis = debugger.analyze_gradient_flow()
    assert [finding.to_json() for finding in analysis.findings] == [each.to_json() for each in doctor.findings]
    beyond = False
    for layer in analysis.layers:
        said = {PROBLEMS.get(problem, problem) for problem in layer.problems}
        expected = set(doctor.verdicts(layer.layer))
        assert expected <= said, layer
        alerts = " ".join(alert.message for alert in debugger.get_layer_alerts(layer.layer))
        for word in said - expected:
            beyond = beyond or word != "oscillating"
            assert says_another_window(layer.words) or says_another_window(alerts), layer
        if layer.health == "healthy":
            assert not expected or doctor.health.word == "healthy"
    if beyond:
        assert analysis.overall_health != "healthy"
    else:
        assert analysis.overall_health == doctor.health.word
    assert (analysis.overall_health == "critical") is (doctor.health.word == "critical")


ALERTS = {
    "nan": "non-finite",
    "inf": "non-finite",
    "vanishing_gradient": "vanishing",
    "exploding_gradient": "exploding",
    "extreme_value": "exploding",
}


@pytest.mark.parametrize("name", [name for name, case in GRADIENTS.items() if len(case.norms) == 1])
def test_the_tensor_inspector_says_what_the_doctor_says_or_that_it_looks_at_one_step(name):
    case = GRADIENTS[name]
    weight = 1.0 if case.weights is None else case.weights  # it always sees the tensor
    doctor = judge_curves(replace(case, weights=weight).curves)
    inspector = TensorInspector()
    for norm in case.norms[LAYER]:
        number = inspector.inspect_tensor([weight], LAYER)
        inspector.inspect_gradients(number, [float(norm)])
    alerts = inspector.get_alerts()
    said = {ALERTS[alert.kind] for alert in alerts}
    assert set(doctor.verdicts()) <= said
    for alert in alerts:
        assert ALERTS[alert.kind] in doctor.verdicts() or says_another_window(alert.message), alert


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_tensor_inspector_says_of_outputs_what_the_doctor_says(name):
    largest, expected = OUTPUTS[name]
    inspector = TensorInspector()
    for value in largest:
        inspector.inspect_tensor([value, -value], "fc")
    alerts = [alert for alert in inspector.get_alerts() if alert.kind in ALERTS]
    assert {ALERTS[alert.kind] for alert in alerts} == ({expected} if expected else set())
    assert all(says_another_window(alert.message) for alert in alerts)


LOSS_ALERTS = {"nan_loss": "non-finite", "infinite_loss": "non-finite", "loss_spike": "unstable", "plateau": "stuck"}


@pytest.mark.parametrize("name", LOSSES)
def test_the_model_diagnostics_say_what_the_doctor_says_of_losses(name):
    losses, _ = LOSSES[name]
    doctor = judge_curves(Curves(losses=losses))
    diagnostics = ModelDiagnostics()
    for step, loss in enumerate(losses, 1):
        diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, loss=float(loss)))
    assert [each.to_json() for each in diagnostics.judge()] == [each.to_json() for each in doctor.findings]
    found = diagnostics.assess_health()
    assert (found.status, found.score) == (doctor.health.word, doctor.health.score)
    status = diagnostics.analyze_training_dynamics().convergence_status
    if len(losses) > 1:
        assert (status == "non-finite") is ("non-finite" in doctor.verdicts())
    for alert in diagnostics.get_alerts():
        word = LOSS_ALERTS.get(alert.kind, alert.kind)
        assert word in doctor.verdicts() or says_another_window(alert.message), alert


@pytest.mark.parametrize("name", UNITS)
def test_the_model_diagnostics_say_what_the_doctor_says_of_units(name):
    kind, share, expected = UNITS[name]
    diagnostics = ModelDiagnostics()
    ratios = {"dead_neurons_ratio": share} if kind == "dead" else {"saturated_neurons_ratio": share}
    diagnostics.record_layer_stats(LayerActivationStats(layer_name="act", mean_activation=0.1, **ratios))
    alerts = [alert.kind for alert in diagnostics.get_alerts()]
    assert alerts == ([f"{expected}_neurons"] if expected else [])
    assert (diagnostics.assess_health().status == "healthy") is (not expected)


@pytest.mark.parametrize(("dead", "expected"), [(0, ()), (3, ()), (19, ("dead",))])
def test_dead_units_that_are_handed_in_are_judged_by_the_doctor(dead, expected):
    debugger = GradientDebugger()
    rng = np.random.default_rng(0)
    for step in range(1, 13):
        active = rng.standard_normal((200, 20))
        active[:, :dead] = -1.0
        debugger.record_activations("act", active)
        debugger.record_gradient_flow("act", 1.0, 0.0, 1.0, step=step)
    assert debugger.judge().verdicts("act") == expected
    assert words(debugger.analyze_gradient_flow().findings) == set(expected)


# ---------------------------------------------------------------- sonde.pytorch_debugging


def one_weight(weight: float) -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(weight)
    return model


@pytest.mark.parametrize("name", [name for name, case in GRADIENTS.items() if len(case.norms) == 1])
def test_check_gradients_says_what_the_doctor_says_or_that_it_looks_at_one_step(tmp_path, name):
    case = GRADIENTS[name]
    weight = 1.0 if case.weights is None else case.weights
    doctor = judge_curves(replace(case, weights=weight).curves)
    model, debugger = one_weight(weight), PyTorchDebugger(enable_gradient_checking=True, log_dir=tmp_path)
    said = set()
    for norm in case.norms[LAYER]:
        model.weight.grad = torch.full((1, 1), float(norm), dtype=torch.float64)
        debugger.check_gradients(model)
        report = debugger.last_gradients
        if report.verdict != "usual":
            said.add(report.verdict)
            assert report.verdict in doctor.verdicts() or says_another_window(report.moment.words), report
    debugger.close()
    assert set(doctor.verdicts()) <= said
    last = gradient_now(case.norms[LAYER][-1], case.norms[LAYER][:-1], weight=weight)
    assert report.verdict == (last.verdict if last.is_wrong else "usual")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_called_by_the_same_word_by_the_debugger_of_a_loop(tmp_path, name):
    losses, expected = LOSSES[name]
    debugger = PyTorchDebugger(debug_mode=True, log_dir=tmp_path)
    for loss in losses:
        debugger.debug_backward_pass(torch.tensor(float(loss), requires_grad=True))
    debugger.close()
    kinds = [event["event_type"] for event in debugger.debug_events if "loss" in event["event_type"]]
    assert bool(kinds) is (expected == "non-finite")
    assert all(kind in ("nan_loss_detected", "inf_loss_detected") for kind in kinds)


@pytest.mark.parametrize("name", LOSSES)
def test_the_training_logger_says_what_the_doctor_says_of_losses(tmp_path, name):
    losses, _ = LOSSES[name]
    doctor = judge_curves(Curves(losses=losses, finished=True))
    with TrainingLogger(tmp_path, "run", enable_console_logging=False) as log, log.training_context():
        for step, loss in enumerate(losses):
            log.log_metrics({"loss": float(loss)}, step=step)
    report = log.get_report()
    assert report["findings"] == [finding.to_json() for finding in doctor.findings]
    assert report["health"] == doctor.health._asdict()
    grave = [finding for finding in doctor.findings if finding.severity != "info"]
    assert report["num_warnings"] == len(grave) + ("non-finite" in doctor.verdicts())
    text = (tmp_path / "run.log").read_text()
    assert all(finding.cause in text for finding in grave)
    if "non-finite" in doctor.verdicts():
        assert f"The loss is {'NaN' if math.isnan(losses[-1]) else 'infinite'}" in text
