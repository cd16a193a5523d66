"""Where an iteration ends, for the orders in which the optimizers of real loops step."""

from __future__ import annotations

import pytest

from sonde.record.rhythm import Rhythm


def iterations(order, known=()):
    """Return which optimizers step in each iteration, and how often the guess before a step had to be corrected."""
    rhythm, found, corrected = Rhythm(known), [""], 0
    for key in order:
        if rhythm.repeats(key):
            rhythm.end()
            found.append("")
            corrected += 1
        elif rhythm.is_late(key):
            rhythm.rejoin()
            found.pop()
            corrected += 1
        found[-1] += key
        if rhythm.note(key):
            rhythm.end()
            found.append("")
    return [each for each in found if each], corrected


@pytest.mark.parametrize("known", ["", "DG"], ids=["found", "handed in"])
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("AAAA", ["A"] * 4),
        ("DG" * 8, ["DG"] * 8),
        ("ABC" * 8, ["ABC"] * 8),
        ("DDDDDG" * 8, ["D", "D", "D", "D", "DG"] * 8),
        ("GDDDDD" * 8, ["GD", "D", "D", "D", *["DG", "D", "D", "D", "D"] * 7, "D"]),
        ("AAAABABAB", ["A", "A", "A", "AB", "AB", "AB"]),
    ],
    ids=["one", "two", "three", "critic", "generator first", "one joins in"],
)
def test_no_optimizer_steps_twice_in_an_iteration(order, expected, known):
    found, corrected = iterations(order, known)
    assert found == expected
    assert corrected <= 4, "the order repeats, so the end of an iteration is known before the next step"


def test_a_hundred_optimizers_are_one_iteration():
    rhythm = Rhythm(map(str, range(100)))
    for _ in range(3):
        over = [rhythm.note(str(each)) for each in range(100)]
        assert over == [False] * 99 + [True]
        rhythm.end()


def test_by_hand_no_step_ends_an_iteration():
    rhythm = Rhythm("A")
    rhythm.by_hand = True
    assert not any(rhythm.note("A") or rhythm.repeats("A") for _ in range(3))


def test_an_optimizer_that_is_gone_is_not_waited_for():
    rhythm = Rhythm("AB")
    rhythm.forget("B")
    assert rhythm.note("A")
