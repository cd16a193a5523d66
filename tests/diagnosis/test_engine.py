"""The doctor: isolation, folding, ranking, memory, and the way from a live session to the run and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sonde
from sonde.core import schema, signals
from sonde.core import tape as tapes
from sonde.diagnosis import ranking
from sonde.diagnosis.case import Case, NotMeasured
from sonde.diagnosis.doctor import Doctor
from sonde.diagnosis.history import HEAD, MAX_POINTS, MAX_RECENT, History
from sonde.diagnosis.learning import judge
from sonde.diagnosis.monitor import Monitor
from sonde.diagnosis.reliability import confidence_of
from sonde.diagnosis.rule import Found, Rule, rule
from sonde.errors import RunDamaged
from sonde.records import Block, Finding, Numbers, Site
from sonde.store.timeline import closed_findings
from sonde.testing import FakeClock, tiny_mlp

RELIABILITY = Path(sonde.__file__).parent / "diagnosis" / "reliability.json"


def block(step: int, values: dict[int, float]) -> Block:
    sites = np.array(sorted(values), np.uint32)
    rows = schema.rows_of_values(np.array([values[site] for site in sorted(values)]))
    bins = np.zeros((len(sites), schema.NUM_BINS), np.uint64)
    return Block(step=step, time=0.0, sites=sites, rows=rows, bins=bins, binned=np.zeros(len(sites), bool))


def finding(kind: str, severity: str = "warning", confidence: float | None = 0.9, step: int = 1) -> Finding:
    return Finding(kind=kind, severity=severity, confidence=confidence, step=step, last_step=step)


def leftover_monitor(shares: list[float], report=lambda finding: None) -> Monitor:
    monitor = Monitor(report)
    monitor.take_sites([Site(id=0, name="optimizer", quantity="vital", part=signals.part_of(signals.LEFTOVER))])
    for step, share in enumerate(shares, 1):
        monitor.take_block(block(step, {0: share}))
    monitor.flush()
    return monitor


def test_history_keeps_the_first_and_the_last_steps():
    history = History()
    for step in range(1, 2001):
        history.put(block(step, {3: float(step)}))
    steps, rows = history.rows(3)
    expected = [*range(1, HEAD + 1), *range(2001 - MAX_RECENT, 2001)]
    assert steps.tolist() == expected
    assert rows[:, schema.MEAN].tolist() == [float(step) for step in expected]
    assert history.num_steps == 2000


def test_history_of_numbers_of_many_steps_is_that_of_their_blocks():
    values = np.random.default_rng(0).normal(size=(5000, 2))
    values[700, 1], values[900, 0] = np.nan, np.inf
    sites = np.array([3, 70], np.uint32)
    one, other = History(), History()
    for history in (one, other):
        history.follow(3)
        history.keep(70)
    for first in range(0, 5000, 500):
        steps = np.arange(first + 1, first + 501)
        numbers = Numbers(steps=steps, times=steps * 1.0, sites=sites, values=values[first : first + 500])
        one.put_numbers(numbers)
        for each in numbers.blocks():
            other.put(each)
    for site in (3, 70):
        for ours, theirs in zip(one.rows(site), other.rows(site), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert (one.num_steps, one.step, one.first_bad) == (other.num_steps, other.step, other.first_bad)
    assert one.latest[70][0] == other.latest[70][0]
    assert one.curves[3].steps[-500:] == other.curves[3].steps[-500:]
    np.testing.assert_array_equal(one.curves[3].values[-500:], other.curves[3].values[-500:])
    assert len(one.curves[3].steps) <= MAX_POINTS


def test_steps_with_nothing_but_followed_numbers_do_not_push_out_readings():
    history = History()
    history.follow(0)
    for step in range(1, 5001):
        history.put(block(step, {0: float(step), 1: float(step)} if step % 50 == 1 else {0: float(step)}))
    steps, rows = history.rows(1)
    assert steps.tolist() == list(range(1, 5001, 50))
    assert rows[:, schema.MEAN].tolist() == steps.tolist()
    assert history.recent.table(np.array([1]), 64, np.array([1]))[0].tolist() == steps[-64:].tolist()
    assert history.curves[0].steps[-1] == history.step == 5000


def test_steps_in_which_no_layer_was_read_do_not_fill_a_panel():
    history = History()
    for step in range(1, 201):
        history.put(block(step, {0: float(step), 1: float(step)} if step % 50 == 1 else {0: float(step)}))
    layers = np.array([1, 2])
    read = [history.recent.table(np.array([site]), 64, layers) for site in (1, 2)]
    assert [steps.tolist() for steps, _ in read] == [[1, 51, 101, 151]] * 2
    assert read[0][1][:, 0, schema.MEAN].tolist() == [1, 51, 101, 151]
    assert not read[1][1].any()


def test_a_further_block_of_a_step_adds_to_it():
    history = History()
    history.put(block(1, {0: 1.0}))
    history.put(block(1, {1: 5.0}))
    assert history.rows(0)[1][0, schema.MEAN] == 1.0
    assert history.rows(1)[1][0, schema.MEAN] == 5.0
    assert history.num_steps == 1


def test_memory_is_bounded_by_keeping_fewer_steps_of_more_sites():
    history = History()
    values = dict.fromkeys(range(40_000), 1.0)
    for step in range(60):
        history.put(block(step, values))
    assert history.recent.length < MAX_RECENT
    assert history.rows(39_999)[0][-1] == 59


def test_a_rule_that_raises_is_isolated_and_named(caplog):
    def broken(case: Case) -> Found | None:
        raise ZeroDivisionError("planted")

    works = Rule(kind="works", find=lambda case: Found(cause="planted", sites=()))
    doctor = Doctor([Rule(kind="breaks", find=broken), works])
    case = Case()
    case.history.put(block(1, {0: 1.0}))
    assert [found.kind for found in doctor.look(case)] == ["works"]
    assert "planted" in doctor.broken["breaks"]
    assert "the rule breaks failed" in caplog.text


def test_a_finding_never_ends_before_it_begins():
    """A tape may hold a step whose readings have not come yet; pages said "steps 2 to 1"."""
    case = Case()
    case.history.put(block(1, {0: 1.0}))
    (found,) = Doctor([Rule(kind="taped", find=lambda case: Found(cause="planted", sites=(), step=2))]).look(case)
    assert (found.step, found.last_step) == (2, 2)


def test_a_damaged_file_is_named_and_is_not_the_fault_of_the_rule(caplog):
    def reads(case: Case) -> Found | None:
        raise RunDamaged("tensors.safetensors cannot be read")

    doctor = Doctor([Rule(kind="taped", find=reads)])
    case = Case()
    case.history.put(block(1, {0: 1.0}))
    assert doctor.look(case) == []
    assert doctor.unmeasured == {"taped": "tensors.safetensors cannot be read"}
    assert (doctor.broken, caplog.text) == ({}, "")


def test_a_missing_signal_gives_not_measured_instead_of_a_verdict():
    def needs(case: Case) -> Found | None:
        raise NotMeasured("optimizer:vital.leftover")

    doctor = Doctor([Rule(kind="needy", find=needs)])
    case = Case()
    case.history.put(block(1, {0: 1.0}))
    assert doctor.look(case) == []
    assert doctor.unmeasured == {"needy": "optimizer:vital.leftover"}


def test_symptoms_are_folded_under_their_cause(monkeypatch):
    monkeypatch.setitem(ranking.EXPLAINS, "cause", frozenset({"symptom"}))
    found = ranking.fold([finding("symptom", "critical"), finding("cause"), finding("loss_plateau"), finding("other")])
    assert {item.kind: item.explains for item in found} == {
        "cause": ("loss_plateau", "symptom"),
        "other": ("loss_plateau",),
    }


def test_a_note_that_explains_a_warned_effect_is_the_warning(monkeypatch):
    monkeypatch.setitem(ranking.EXPLAINS, "note", frozenset({"dead_relu"}))
    notes = [finding("note", "info"), finding("other", "info")]
    found = ranking.fold([finding("dead_relu"), *notes])
    assert [(item.kind, item.severity, item.explains) for item in found] == [
        ("note", "warning", ("dead_relu",)),
        ("other", "info", ()),
    ]
    assert [item.severity for item in ranking.fold([finding("dead_relu", "info"), *notes])] == ["info"] * 2


def test_where_a_bad_number_began_is_kept_when_it_is_folded(monkeypatch):
    monkeypatch.setitem(ranking.EXPLAINS, "cause", frozenset({"nan_forward"}))
    begun = replace(finding("nan_forward"), data={"origin": {"line": 3}, "reason": "log_of_zero", "last_steps": []})
    (found,) = ranking.fold([begun, replace(finding("cause", "critical"), data={"own": 1})])
    assert found.data == {"origin": {"line": 3}, "reason": "log_of_zero", "own": 1}


def test_an_outcome_stands_alone_if_nothing_explains_it():
    assert [item.kind for item in ranking.fold([finding("loss_plateau"), finding("note", "info")])] == [
        "loss_plateau",
        "note",
    ]


def test_of_two_that_explain_each_other_the_better_stays(monkeypatch):
    monkeypatch.setitem(ranking.EXPLAINS, "a", frozenset({"b"}))
    monkeypatch.setitem(ranking.EXPLAINS, "b", frozenset({"a"}))
    found = ranking.fold([finding("a", confidence=0.5), finding("b", confidence=0.8)])
    assert [(item.kind, item.explains) for item in found] == [("b", ("a",))]


def test_findings_are_ordered_by_their_evidence_then_by_severity_and_notes_come_last():
    exact, statistic = replace(finding("b", confidence=None), exact=True), finding("a", confidence=0.9)
    graver, tried = finding("c", "critical", confidence=None), replace(finding("d"), experiment="lr / 30: learns")
    note = replace(finding("e", "info"), exact=True)
    found = ranking.fold([statistic, note, exact, graver, tried])
    assert [(item.kind, item.basis) for item in found] == [
        ("b", "exact"),
        ("d", "experiment"),
        ("c", "statistics"),
        ("a", "statistics"),
        ("e", "exact"),
    ]


def test_a_cause_that_explains_something_comes_before_one_that_explains_nothing(monkeypatch):
    monkeypatch.setitem(ranking.EXPLAINS, "b", frozenset({"symptom"}))
    found = ranking.fold([finding("a", confidence=0.9), finding("b", confidence=0.5), finding("symptom")])
    assert [item.kind for item in found] == ["b", "a"]


@pytest.mark.parametrize(("reason", "first"), [("log_of_zero", "nan_in_loss"), ("overflow", "lr_too_high")])
def test_a_known_operation_outside_its_domain_is_not_blamed_on_the_learning_rate(reason, first):
    operation = replace(finding("nan_in_loss", "critical"), exact=True, data={"reason": reason, "origin": {}})
    assert [item.kind for item in ranking.fold([finding("lr_too_high", "critical"), operation])] == [first]


def test_an_outcome_without_a_cause_lists_what_was_looked_for_and_not_found():
    def fails(case):
        return Found(cause="Nothing was learnt.", sites=())

    rules = [
        Rule(kind="not_learning", find=fails, outcome=True),
        Rule(kind="lr_too_low", find=lambda case: None),
        Rule(kind="needy", find=lambda case: case.need_loss() and None),
    ]
    case = Case()
    case.history.put(block(1, {0: 1.0}))
    (found,) = Doctor(rules).look(case)
    assert found.data["ruled_out"] == ["lr_too_low"]
    assert found.cause == "Nothing was learnt. This is a symptom; ruled out: lr too low."


def test_confidence_is_what_the_benchmark_measured_and_absent_where_it_measured_nothing():
    right, wrong = (
        json.loads(RELIABILITY.read_text())["rules"]["label_shuffle_mismatch"][name] for name in ("right", "wrong")
    )
    assert confidence_of("label_shuffle_mismatch", "warning") == pytest.approx((right + 1) / (right + wrong + 2))
    assert confidence_of("label_shuffle_mismatch", "info") is None
    assert confidence_of("ddp_replicas_diverge", "critical") is None


def test_a_finding_that_is_taken_gets_the_confidence_of_its_kind():
    doctor, case = Doctor([]), Case()
    doctor.take(finding("missing_zero_grad", confidence=None))
    case.history.put(block(1, {0: 1.0}))
    assert doctor.look(case)[0].confidence == confidence_of("missing_zero_grad", "warning")


def test_a_finding_is_reported_once_and_withdrawn_when_it_no_longer_holds():
    said: list[Finding] = []
    leftover_monitor([1.0] * 6 + [0.0] * 30, said.append)
    assert [(item.kind, item.withdrawn) for item in said] == [("missing_zero_grad", False), ("missing_zero_grad", True)]
    assert said[0].step == 1


def test_a_finding_on_the_edge_does_not_flap_and_one_that_closed_keeps_its_span():
    said: list[Finding] = []
    leftover_monitor([1.0] * 6 + [0.0, 1.0] * 20, said.append)
    assert [item.withdrawn for item in said] == [False]
    lasting = replace(finding("a", step=5), last_step=20)
    lines = [finding("a", step=5), lasting, finding("b", step=7), replace(lasting, withdrawn=True)]
    closed = closed_findings([*lines, finding("a", step=30)])
    assert [(each.kind, each.step, each.last_step) for each in closed] == [("a", 5, 20)]


def count_looks(cost: float, steps: int, share: float | None = None, step_seconds: float = 1.0) -> int:
    """Count how often a monitor looks at a run if a look takes `cost` seconds."""
    return len(looks_at(cost, steps, share, step_seconds))


def looks_at(
    cost: float, steps: int, share: float | None = None, step_seconds: float = 1.0, run: Path | None = None
) -> list[int]:
    """Return the steps at which a monitor looks at a run if a look takes `cost` seconds."""
    clock, looks = FakeClock(0.0), []

    class Slow(Doctor):
        def look(self, case):
            clock.advance(cost)
            looks.append(case.step)
            return []

    monitor = Monitor(lambda finding: None, Slow(), share=share, clock=clock, own_time=clock, run=run)
    for step in range(1, steps + 1):
        monitor.take_block(block(step, {0: 1.0}))
        clock.advance(step_seconds)
    return looks


def test_looks_that_cost_too_much_come_at_a_few_steps_only():
    assert count_looks(5.0, 200) == count_looks(0.0001, 200, share=0.01) == 9 + 38
    assert count_looks(5.0, 200, share=0.01) == 1  # one look is 3 % of 167 steps
    assert count_looks(0.08, 200, share=0.001) == 2  # steps 3 and 10; then within the share, which is 0.2 s of 200


def test_a_look_that_has_to_read_a_large_tape_waits_until_it_is_within_the_share(tmp_path):
    assert looks_at(0.0001, 400, share=0.01, step_seconds=0.05, run=tmp_path)[0] == 4
    values = tuple(tapes.Value(id=each, role="constant", name="x" * 50) for each in range(20_000))
    size = (tapes.write(tmp_path, tapes.Tape(step=2, values=values)) / tapes.INFO).stat().st_size
    first, second, *_ = looks_at(0.0001, 400, share=0.01, step_seconds=0.05, run=tmp_path)
    assert first == pytest.approx(4e-8 * size / (0.01 * 0.05), rel=0.3)
    assert first > 50
    assert second - first <= 10  # the next look reads nothing


def test_tapes_are_not_listed_at_steps_at_which_no_look_is_affordable(tmp_path, monkeypatch):
    listed = []
    monkeypatch.setattr(tapes, "folders", lambda run: listed.append(run) or {})
    looks = looks_at(0.08, 200, share=0.001, run=tmp_path)
    assert len(listed) <= 3 * len(looks) < 10


def test_short_steps_are_judged_at_a_few_of_the_first_whatever_it_costs():
    assert count_looks(0.0005, 200, share=0.0001, step_seconds=0.001) == 5


@pytest.mark.parametrize("shares", [[0.0] * 8, [1.0, 1.0, 0.0] * 3])
def test_no_leftover_no_finding(shares):
    assert leftover_monitor(shares).findings == []


def test_findings_travel_from_a_monitor_into_the_run(tmp_path):
    model = tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.watch(model, optimizer, run=tmp_path / "run")
    with session:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        session._pipeline.worker.publish(replace(finding("nan_forward", "critical"), sites=("0",), data={"line": 3}))
    run = sonde.open_run(tmp_path / "run")
    assert [item.kind for item in run.findings][:1] == ["nan_forward"]
    assert run.findings[0].data == {"line": 3}
    assert [item.kind for item in session.findings][:1] == ["nan_forward"]
    assert [item.kind for item in sonde.diagnose(run).findings][:1] == ["nan_forward"]
    assert sonde.verify(run.path).ok


@pytest.mark.parametrize("seed", range(10))
def test_a_slow_fall_in_much_noise_is_learning_and_noise_alone_is_not(seed):
    rng = np.random.default_rng(seed)
    noise = 0.35 * rng.standard_normal(150)
    assert judge(np.linspace(1.43, 0.85, 150) + noise).state == "improving"
    assert judge(1.43 + noise).state != "improving"


def test_coming_back_from_where_the_first_steps_threw_it_is_not_learning():
    rng = np.random.default_rng(0)
    back = np.concatenate([[2.34], 2000 * 0.4 ** np.arange(10), 2.33 + 0.05 * rng.standard_normal(100)])
    assert judge(back).state == "flat"
    assert judge(back - np.linspace(0, 1, len(back))).state == "improving"


def test_an_exact_finding_stays_when_fewer_steps_are_recorded_and_goes_when_it_is_mended():
    wrong = [True]

    @rule("exact_one", fix="f", refute="r", exact=True, since=0)
    def exact_one(case):
        return Found(cause="c", sites=()) if wrong[0] else None

    for thinned in (False, True):
        wrong[0] = True
        doctor, case = Doctor(rules=(exact_one,)), Case()
        assert doctor.look(case)
        case.strides = {"outputs": 4} if thinned else {}
        wrong[0] = False
        assert bool(doctor.look(case)) is thinned
