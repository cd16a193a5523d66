"""Errors can be caught by the names that messages and tracebacks show."""

from __future__ import annotations

import inspect

import pytest

import sonde
from sonde import errors


def test_every_error_is_at_the_top_level():
    named = {name for name, each in vars(errors).items() if inspect.isclass(each)}
    assert named == {name for name in sonde.__all__ if inspect.isclass(getattr(sonde, name)) and name in named}
    assert all(issubclass(getattr(sonde, name), sonde.SondeError) for name in named)
    assert all(name in errors.__doc__ for name in named), "the tree in its docstring shows all of them"


def test_an_error_is_caught_by_the_name_it_shows():
    with pytest.raises(sonde.OptionError, match="at least 1; got 0") as caught:
        sonde.every(0)
    assert type(caught.value).__name__ == "OptionError"
