"""The parts of a debug session say what the doctor says of the same curves, or name the steps that they look at."""

from __future__ import annotations

import math

import pytest
from tests.diagnosis.test_one_judgement import GRADIENTS, says_another_window, words

from sonde.debug import (
    DebugSession,
    ModelPerformanceMetrics,
)
from sonde.diagnosis.judgement import Curves, health, judge_curves

PROBLEM_OF = {"non-finite": "nonfinite"}


def session_of(case):
    session = DebugSession().start()
    for step, loss in enumerate(case.losses, 1):
        session.model_diagnostics.record_performance(ModelPerformanceMetrics(training_step=step, loss=loss))
    for name, norms in case.norms.items():
        for step, norm in enumerate(norms, 1):
            session.gradient_debugger.record_gradient_flow(name, float(norm), step=step)
    return session


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_judged_as_by_the_doctor_and_single_steps_say_so(name):
    case = GRADIENTS[name]
    doctor = judge_curves(Curves(losses=case.losses, gradients=case.norms))
    session = session_of(case)
    analysis = session.gradient_debugger.analyze_gradient_flow()
    for layer in analysis.layers:
        reply = {PROBLEM_OF.get(word, word) for word in doctor.verdicts(layer.layer)}
        assert reply <= set(layer.problems)
        if set(layer.problems) - reply:
            assert says_another_window(layer.words), layer.words
    assert words(analysis.findings) == words(doctor.findings)
    if health(doctor.findings).word != "healthy":
        assert analysis.overall_health == health(doctor.findings).word
    elif analysis.overall_health != "healthy":
        assert any(layer.problems for layer in analysis.layers)
    for alert in session.gradient_debugger.get_alerts():
        assert says_another_window(alert.message), alert.message
    session.stop()


@pytest.mark.parametrize("bad", ["gradient", "loss", "tensor"])
def test_a_session_with_something_critical_is_not_called_healthy(bad):
    with DebugSession() as session:
        for step in range(20):
            spoilt = math.nan if step == 19 else 1.0
            session.debug_gradients("fc", [spoilt if bad == "gradient" else 1.0])
            session.log(loss=spoilt if bad == "loss" else 1.0 / (step + 1))
            session.debug_tensor([spoilt if bad == "tensor" else 1.0], "x")
    assert session.report.summary().critical_issues >= 1
    if bad != "tensor":
        assert session.report.gradients["overall_health"] == "critical"
    assert session.report.diagnostics["health"]["status"] == "critical"
