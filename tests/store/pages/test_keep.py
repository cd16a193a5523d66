"""Which captures stay once the scores are known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.pages.making import capture, same, write

from sonde.errors import OptionError
from sonde.store.pages import PageWriter, load_debug_outputs, verify_pages
from sonde.store.pages.keep import Keep, copy_datapoints, move_pages


def test_the_worst_stay_and_a_control_of_good_ones():
    scores = {at: float(at) for at in range(100)}
    kept = Keep.parse("worst:10+control:4").choose(scores, scores, higher_is_better=True, seed=0)
    assert set(range(10)) <= kept
    control = kept - set(range(10))
    assert len(control) == 4
    assert min(control) >= 55, "the control comes from the better half"
    losses = Keep.parse("worst:10+control:0").choose(scores, scores, higher_is_better=False, seed=0)
    assert losses == set(range(90, 100))


@given(
    scores=st.dictionaries(st.integers(0, 99), st.floats(), max_size=60),
    worst=st.integers(0, 70),
    control=st.integers(0, 20),
    seed=st.integers(0, 5),
    higher=st.booleans(),
)
def test_the_choice_is_exact_and_the_same_each_time(scores, worst, control, seed, higher):
    keep = Keep(worst=worst, control=control)
    kept = keep.choose(scores, scores, higher_is_better=higher, seed=seed)
    assert kept == keep.choose(reversed(list(scores)), scores, higher_is_better=higher, seed=seed)
    assert len(kept) <= worst + control
    assert len(kept) >= min(worst, len(scores))

    def badness(each):
        return math.inf if math.isnan(scores[each]) else -scores[each] if higher else scores[each]

    left = [badness(each) for each in scores if each not in kept]
    worst_kept = sorted(map(badness, kept), reverse=True)[:worst]
    if left and worst and len(worst_kept) == worst:
        assert max(left) <= min(worst_kept)


def test_scores_from_json_and_missing_scores():
    kept = Keep.parse("worst:1+control:0").choose(
        [1, 2, 3, "x"], {"1": 5.0, "2": 1.0, "x": 9.0}, higher_is_better=True, seed=0
    )
    assert kept == {2, 3}


@pytest.mark.parametrize("text", ["", "worst", "worst:-1", "worst:5+worst:6", "best", "all", "worst:5,control:1"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(OptionError, match="worst:50"):
        Keep.parse(text)


def test_the_default_control_is_a_tenth():
    assert Keep.parse("worst:50") == Keep(worst=50, control=5)
    assert Keep.parse("worst:3+best:2") == Keep(worst=3, best=2, control=1)


def test_captures_are_copied_as_they_are(tmp_path):
    write(tmp_path / "from", range(12), page_bytes=600)
    source = load_debug_outputs(tmp_path / "from")
    with PageWriter(tmp_path / "to", page_bytes=600, sync=False) as writer:
        copy_datapoints(source, writer, [3, 9, 4])
    copied = load_debug_outputs(tmp_path / "to")
    assert list(copied) == [3, 4, 9]
    for each in copied:
        assert all(same(copied[each][name], value) for name, value in capture(each).items())
        assert copied.info(each) == source.info(each)
        left, right = (read.previews(each)["features"]["layer1/0"] for read in (source, copied))
        assert left.stats == right.stats
    assert verify_pages(tmp_path / "to").ok


def test_pages_move_behind_those_that_are_there(tmp_path):
    write(tmp_path / "from", range(6), page_bytes=600)
    writer = write(tmp_path / "to", range(6, 9), close=False)
    move_pages(tmp_path / "from", writer)
    writer.add(9, capture(9))
    writer.close()
    assert list(load_debug_outputs(tmp_path / "to")) == list(range(10))
    assert verify_pages(tmp_path / "to").ok
    assert not list((tmp_path / "from").glob("page_*"))
