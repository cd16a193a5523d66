"""Marks of table rows: what findings say, and single steps outside the bands of the judgement; nothing else."""

import numpy as np
import pytest

from sonde.analysis import History, mark_all
from sonde.records import Evidence, Finding, Site


def history(scale=1.0, *, name="a.weight", quantity="gradient", steps=100, shape=(4, 4), seed=0):
    values = scale * np.exp(np.random.default_rng(seed).normal(0, 0.1, steps))
    site = Site(id=0, name=name, quantity=quantity, shape=shape)
    return History(site, np.arange(steps), values, np.zeros(steps))


def finding(kind="exploding_gradient", severity="warning", sites=("a.weight",), series=()):
    evidence = tuple(Evidence(name="", value=1.0, series=each) for each in series)
    return Finding(
        kind=kind, severity=severity, confidence=0.8, step=7, last_step=90, sites=sites, evidence=evidence, cause="c"
    )


def mark(one, findings=()):
    return mark_all([one], findings)[0]


@pytest.mark.parametrize("quantity", ["parameter", "gradient", "update", "output", "scalar"])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_site_that_goes_on_as_before_has_nothing_to_say_whatever_its_size_and_its_peers(quantity, scale):
    peers = [history(1.0, quantity=quantity, name=str(seed), seed=seed) for seed in range(8)]
    marks = mark_all([*peers, history(scale, quantity=quantity)], [])
    assert all((each.level, each.reason) == ("fine", "") for each in marks)


@pytest.mark.parametrize(("severity", "level"), [("critical", "bad"), ("warning", "bad")])
def test_a_finding_marks_the_site_that_it_names_by_its_severity(severity, level):
    found = mark(history(), [finding(severity=severity)])
    assert (found.level, found.reason, found.step) == (level, "exploding since step 7", 7)
    assert mark(history(name="b.weight"), [finding(severity=severity)]).level == "fine"


def test_a_note_marks_nothing_and_neither_does_a_finding_about_most_layers():
    assert mark(history(), [finding(severity="info")]).level == "fine"
    names = [f"{number}.weight" for number in range(20)]
    layers = [history(name=name) for name in names]
    assert {each.level for each in mark_all(layers, [finding(sites=tuple(names))])} == {"fine"}
    assert mark_all(layers, [finding(sites=tuple(names[:3]))])[0].level == "bad"


def test_a_batch_that_makes_all_gradients_jump_marks_none_of_them():
    layers = [history(name=f"{number}.weight", steps=400, seed=number) for number in range(20)]
    for each in layers:
        each.values[310] *= 1000
    layers[4].values[200] *= 1000
    marks = mark_all(layers)
    assert [each.step for each in marks if each.level != "fine"] in ([], [200])
    assert sum(each.level != "fine" for each in marks) <= 1


def test_the_gravest_finding_comes_first():
    notes = [finding("vanishing_gradient", "info"), finding("exploding_gradient", "critical")]
    assert mark(history(), notes).reason == "exploding since step 7"


def test_a_finding_about_a_layer_marks_its_sites_and_one_with_a_curve_only_what_was_measured():
    layer = finding("dead_relu", sites=("a",))
    assert mark(history(), [layer]).reason == "dead since step 7"
    measured = finding(series=("a.weight:gradient norm",))
    assert mark(history(), [measured]).level == "bad"
    assert mark(history(quantity="parameter"), [measured]).level == "fine"


def test_a_finding_without_a_word_of_its_own_is_named_by_its_kind():
    assert mark(history(quantity="parameter"), [finding("bad_init_scale")]).reason == "bad init scale since step 7"


def test_a_non_finite_reading_is_worst_and_names_its_step():
    bad = history()
    bad.nonfinite[30] = 5
    found = mark(bad)
    assert (found.level, found.reason, found.step) == ("bad", "non-finite at step 30", 30)
    bad.nonfinite[30:] = 5
    assert mark(bad).reason == "non-finite since step 30"


def test_a_gradient_of_zero_says_since_when_and_a_parameter_of_zero_is_a_choice():
    zero = history()
    zero.values[60:] = 0
    assert (mark(zero).level, mark(zero).reason) == ("odd", "all zero since step 60")
    zero.values[:] = 0
    assert mark(zero).reason == "all zero"
    unused = history(quantity="parameter")
    unused.values[:] = 0
    assert mark(unused).level == "fine"


@pytest.mark.parametrize(("factor", "level"), [(8, "fine"), (15, "fine"), (40, "fine"), (150, "odd"), (1e6, "odd")])
def test_one_step_is_marked_by_the_band_of_the_judgement(factor, level):
    jumped = history(steps=400)
    jumped.values[310] *= factor
    assert mark(jumped).level == level
    if level == "odd":
        assert mark(jumped).step == 310
        assert mark(jumped).reason.startswith("jumped ")
        assert mark(jumped).reason.endswith(" at step 310")


def test_a_fall_is_marked_beyond_three_orders_if_it_lasts():
    fell = history(steps=400)
    fell.values[200] /= 4000
    assert mark(fell).level == "fine"  # it passed through zero
    fell.values[200] *= 20
    fell.values[200:210] /= 200
    assert mark(fell).level == "fine"
    fell.values[200:210] /= 20
    assert mark(fell).reason.startswith("faded ")
    assert mark(fell).step == 200


def test_slow_decay_and_large_outputs_are_what_training_looks_like():
    fading = history(steps=500)
    fading.values[:] *= np.exp(-np.arange(500) / 40)
    assert mark(fading).level == "fine"
    growing = history(quantity="output")
    growing.values[60:] *= 50
    assert mark(growing).level == "fine"
    growing.values[60:] *= 50
    assert mark(growing).level == "odd"


def test_numbers_may_jump():
    rate = history(1e-3, name="optimizer.group0.lr", quantity="scalar", shape=())
    rate.values[50:] /= 1e6
    loss = history(np.geomspace(2.0, 1e-9, 100), name="loss_fn", quantity="output", shape=())
    assert [each.level for each in mark_all([rate, loss])] == ["fine", "fine"]


def test_an_empty_history_is_fine():
    empty = History(Site(id=0, name="a", quantity="output"), np.zeros(0, int), np.zeros(0), np.zeros(0))
    assert mark(empty).level == "fine"
    assert mark_all([]) == []


def test_a_gradient_that_grew_over_many_readings_has_not_jumped():
    grown = np.concatenate([np.full(60, 1e-5), np.geomspace(1e-5, 5e-3, 30), 3e-3 * np.ones(20)])
    site = Site(id=0, name="a.weight", quantity="gradient", shape=(4, 4))
    assert mark(History(site, np.arange(len(grown)), grown, np.zeros(len(grown)))).level == "fine"
