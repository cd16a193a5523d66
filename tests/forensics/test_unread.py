"""Arguments that the code of a `forward` never reads."""

from __future__ import annotations

import functools

import pytest
from torch import nn

from sonde.forensics.tape.unread import unread_arguments


class Stores(nn.Module):
    def forward(self, x, t, unused=1):
        z = x
        later = t
        return z + later


class Closes(nn.Module):
    def forward(self, x, t):
        def inner():
            return t

        return inner() + x


class Collects(nn.Module):
    def forward(self, x, *, mask=None, t=0):
        return [x * mask for _ in range(2)]


class Overwrites(nn.Module):
    def forward(self, x, t):
        if x is None:
            t = 0  # noqa: F841 - that is the point
        return x


class HandsOn(nn.Module):
    def forward(self, x, *rest, **named):
        return x


class Wrapped(nn.Module):
    @functools.lru_cache  # noqa: B019 - no plain function any more
    def forward(self, x, t):
        return x


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Stores, ("unused", "[2]")),
        (Closes, ()),
        (Collects, ("t",)),
        (Overwrites, ("t", "[1]")),
        (HandsOn, ()),
        (Wrapped, ()),
    ],
)
def test_arguments_that_are_never_read_are_named_with_their_places(kind, names):
    assert unread_arguments(kind()) == names
