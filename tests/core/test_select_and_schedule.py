"""Where and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.errors import OptionError, SelectionError
from sonde.schedule import at, between, every, first, log_spaced, schedule
from sonde.select import check_each_matches, everything, glob, kind, regex, selector

NAMES = {"layers.0.fc": "Linear", "layers.0.drop": "Dropout", "layers.1.fc": "Linear", "head": "Linear"}


def chosen(where):
    test = selector(where)
    return {name for name, class_name in NAMES.items() if test(name, class_name)}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, set(NAMES)),
        ("head", {"head"}),
        ("layers.*.fc", {"layers.0.fc", "layers.1.fc"}),
        ("re:layers\\.0", {"layers.0.fc", "layers.0.drop"}),
        ("re:ayers", set()),
        ("kind:Drop*", {"layers.0.drop"}),
        (["head", "kind:Dropout"], {"head", "layers.0.drop"}),
        (glob("layers.*") & ~kind("Linear"), {"layers.0.drop"}),
        (regex("head") | kind("Dropout"), {"head", "layers.0.drop"}),
        (~everything(), set()),
    ],
)
def test_selectors(where, expected):
    assert chosen(where) == expected


def test_text_shows_what_was_combined():
    assert (glob("a") & ~kind("B") | regex("c")).text == "((a & ~kind:B) | re:c)"


def test_each_part_of_a_list_must_match_something():
    check_each_matches(["head", "kind:Linear"], NAMES, "Net")
    with pytest.raises(SelectionError, match="Nothing in Net matches 'heed' \\(nearest: head\\)"):
        check_each_matches(["head", "heed"], NAMES, "Net")


@given(st.integers(1, 50), st.integers(0, 500))
def test_every_chooses_multiples(n, step):
    assert every(n)(step) == (step % n == 0)


@given(st.integers(0, 300), st.integers(0, 300))
def test_schedules_combine_like_sets(step, other):
    a, b = every(3), between(other, other + 50)
    assert (a | b)(step) == (a(step) or b(step))
    assert (a & b)(step) == (a(step) and b(step))
    assert (~a)(step) != a(step)


def test_first_and_at():
    assert [s for s in range(10) if (first(2) | at(5, 7))(s)] == [0, 1, 5, 7]


@given(st.integers(1, 40))
def test_log_spaced_thins_out_but_never_stops(per_decade):
    chosen_steps = [step for step in range(1, 10_001) if log_spaced(per_decade)(step)]
    per_last_decade = [step for step in chosen_steps if step > 1000]
    assert abs(len(per_last_decade) - per_decade) <= 1
    assert chosen_steps[0] == 1


@pytest.mark.parametrize("wrong", [lambda: every(0), lambda: every(True), lambda: first(-1), lambda: between(5, 5)])
def test_schedules_that_mean_nothing_are_refused(wrong):
    with pytest.raises(OptionError):
        wrong()


def test_any_function_is_a_schedule():
    assert [s for s in range(8) if schedule(lambda s: s in (1, 6))(s)] == [1, 6]
    assert schedule(4).text == "every(4)"
