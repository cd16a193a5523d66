import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sonde.analysis.query import MOST_SIGNS, Columns, parse, percentiles
from sonde.errors import OptionError

NAN = math.nan
LABELS = np.array([3, 5, None, 7, 3], object)
COLUMNS = Columns(
    {
        "idx": np.array([10.0, 11, 12, 13, 14]),
        "loss": np.array([0.1, 0.9, NAN, 0.5, 2.0]),
        "accuracy": np.array([1.0, 0, 0, 1, 0]),
        "class_iou[1]": np.array([0.0, 0.2, 0.4, 0.6, 0.8]),
        "val/f1": np.array([5.0, 4, 3, 2, 1]),
        "label": LABELS,
        "name": np.array(["cat", "dog", "cat", None, "eel"], object),
    },
    {"loss": -1, "accuracy": 1},
    5,
)


def picked(text):
    return np.flatnonzero(parse(text).select(COLUMNS)).tolist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("loss > 0.5", [1, 4]),
        ("loss > 0.5 and accuracy == 0 and label in (3, 5)", [1, 4]),
        ("0.1 < loss <= 0.9", [1, 3]),
        ("not accuracy", None),
        ("not (accuracy == 1)", [1, 2, 4]),
        ("label != 3", [1, 3]),
        ("label not in (3, 7)", [1]),
        ("label + 1 >= 6", [1, 3]),
        ("name == 'cat' or idx == 13", [0, 2, 3]),
        ("name in ['dog', 'eel']", [1, 4]),
        ("name != 'cat'", [1, 4]),
        ("name == 3", []),
        ("isnan(loss)", [2]),
        ("loss != 0.5", [0, 1, 4]),
        ("class_iou[1] >= 0.6", [3, 4]),
        ("score('val/f1') < 3", [3, 4]),
        ("score('class_iou[1]') == 0", [0]),
        ("percentile(loss) >= 75", [4]),
        ("rank(loss) == 1", [2]),
        ("rank(loss) <= 2", [2, 4]),
        ("rank(accuracy) == 1", [1, 2, 4]),
        ("abs(loss - 1) < 0.2", [1]),
        ("loss * 2 - accuracy / 2 > 1", [1, 4]),
        ("accuracy / 0 == accuracy", []),
        ("-loss < -0.5", [1, 4]),
        ("True", [0, 1, 2, 3, 4]),
        ("1 == 1 and loss > 1", [4]),
    ],
)
def test_an_expression_picks_what_it_says(text, rows):
    if rows is None:
        with pytest.raises(OptionError, match="not a condition"):
            picked(text)
    else:
        assert picked(text) == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("los > 1", r"no column los \(nearest: loss\); there is: idx, loss"),
        ("loss = 1", "write =="),
        ("loss > 1 && accuracy == 0", "Write 'and'"),
        ("loss > 1 2", "cannot be read at sign"),
        ("(loss > 1) & (accuracy == 0)", "write 'and'"),
        ("loss.max() > 1", "no function something"),
        ("loss.__class__ == 1", r"a dot \(sign 1\)"),
        ("__import__('os').system('true')", "no function"),
        ("prcentile(loss) > 5", r"nearest: percentile"),
        ("percentile(loss, 5) > 5", "takes one column"),
        ("score(loss) > 5", "in quotes"),
        ("[x for x in (1, 2)] == 1", "means nothing here"),
        ("(lambda: 1)() == 1", "no function"),
        ("loss", "not a condition"),
        ("loss + 1 and accuracy == 0", "not a condition"),
        ("name > 3", "holds texts"),
        ("name < 'x'", "holds texts|is a text"),
        ("label in 3", "without a list"),
        ("(1, 2) == loss", "a list"),
        ("loss is 1", "write =="),
        ("loss ** 9 > 1", "a power"),
        ("f'{loss}' == 1", "means nothing here"),
        ("loss > None", "None"),
        ("loss > 1e5j", "means nothing"),
        (f"loss > {10**30}", "too large"),
        ("(" * 250 + "loss" + ")" * 250 + " > 1", "cannot be read|nested"),
        ("-" * 100 + "loss > 1", "nested|cannot be read"),
        ("loss > 1" + " " * MOST_SIGNS, "signs; at most"),
        ("loss\x00 > 1", "cannot be read"),
    ],
)
def test_an_error_names_the_culprit_and_the_cure(text, words):
    with pytest.raises(OptionError, match=words):
        picked(text)


WORDS = [
    "loss",
    "label",
    "name",
    "(",
    ")",
    "and",
    "or",
    "not",
    "in",
    "1",
    "0.5",
    "'a'",
    ",",
    "<",
    "==",
    "percentile",
    ".x",
    "[1]",
    "rank(",
    "lambda:",
    "-",
    "*",
    "if",
    "else",
    "**",
    "=",
    ":=",
    "{",
    "}",
    "@",
    "await",
    "\\",
    "\n",
    "\x00",
    "é",
]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=14).map(" ".join)))
def test_any_text_is_either_a_condition_or_an_error_of_ours(text):
    try:
        mask = parse(text).select(COLUMNS)
    except OptionError:
        return
    assert mask.dtype == bool
    assert mask.shape == (5,)


@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_percentiles_are_shares_of_lower_values(values):
    array = np.array(values, np.float64)
    known = [each for each in values if not math.isnan(each)]
    for value, found in zip(values, percentiles(array), strict=True):
        if math.isnan(value):
            assert math.isnan(found)
        else:
            assert found == pytest.approx(100 * sum(each < value for each in known) / len(known))


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=20),
    st.floats(-5, 5),
    st.integers(0, 3),
)
def test_a_condition_agrees_with_python_row_by_row(rows, limit, label):
    columns = Columns(
        {"loss": np.array([row[0] for row in rows]), "label": np.array([row[1] for row in rows], np.float64)},
        {},
        len(rows),
    )
    text = f"loss > {limit!r} and label != {label} or not (loss + label <= {label})"
    found = parse(text).select(columns).tolist()
    assert found == [bool((a > limit and b != label) or not (a + b <= label)) for a, b in rows]
