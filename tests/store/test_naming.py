"""Runs that number themselves."""

from __future__ import annotations

import pytest

from sonde.errors import OptionError
from sonde.store.runs import place_of


def test_a_plain_name_is_taken_as_it_is(tmp_path):
    assert place_of(tmp_path / "first") == tmp_path / "first"


def test_a_star_becomes_the_number_after_the_highest(tmp_path):
    assert place_of(f"{tmp_path}/new/mlp-*") == tmp_path / "new" / "mlp-1"
    for name in ("mlp-1", "mlp-9", "mlp-10", "mlp-x", "cnn-77", "mlp-3b"):
        (tmp_path / name).mkdir()
    assert place_of(f"{tmp_path}/mlp-*") == tmp_path / "mlp-11"
    assert place_of(f"{tmp_path}/mlp-*b") == tmp_path / "mlp-4b"
    assert place_of(f"{tmp_path}/*") == tmp_path / "1"


def test_to_resume_is_to_take_the_highest_number(tmp_path):
    assert place_of(f"{tmp_path}/mlp-*", resume=True) == tmp_path / "mlp-1"
    (tmp_path / "mlp-4").mkdir()
    assert place_of(f"{tmp_path}/mlp-*", resume=True) == tmp_path / "mlp-4"


@pytest.mark.parametrize("name", ["*/mlp", "a-*-*"])
def test_a_star_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(OptionError, match="in the last part"):
        place_of(tmp_path / name)
