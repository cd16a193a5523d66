from __future__ import annotations

import collections
import dataclasses
import enum

import pytest
import torch
from torch import nn

from sonde.errors import OptionError
from sonde.training import apply_tensor_op

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


class Plain:
    def __init__(self):
        self.x = torch.ones(2)
        self.note = "n"


class Color(enum.Enum):
    red = 1


def double(value):
    return apply_tensor_op(func=lambda tensor: tensor * 2, inputs=value)


def test_tensors_in_containers_are_replaced_and_the_rest_stays():
    got = double({"a": torch.ones(2), "b": [torch.ones(1), 3], "c": (torch.ones(1), "t"), "d": None})
    assert got["a"].tolist() == [2, 2]
    assert got["b"][0].tolist() == [2]
    assert got["b"][1] == 3
    assert got["c"][0].tolist() == [2]
    assert got["c"][1] == "t"
    assert got["d"] is None


def test_a_method_is_called_by_name():
    got = apply_tensor_op(method="sum", method_kwargs={"dim": 0}, inputs=[torch.ones(2, 3)])
    assert got[0].tolist() == [2, 2, 2]
    assert apply_tensor_op(method="detach", inputs=torch.ones(1, requires_grad=True)).requires_grad is False


@pytest.mark.parametrize("given", [{}, {"func": abs, "method": "abs"}, {"func": abs, "method_kwargs": {"a": 1}}])
def test_exactly_one_of_func_and_method_is_taken(given):
    with pytest.raises(OptionError):
        apply_tensor_op(inputs=torch.ones(1), **given)


def test_containers_keep_their_kind():
    ordered = collections.OrderedDict(b=torch.ones(1), a=1)
    default = collections.defaultdict(list, a=torch.ones(1))
    pair, got_ordered, got_default = double([Pair(torch.ones(1), 2), ordered, default])
    assert type(pair) is Pair
    assert pair.left.tolist() == [2]
    assert type(got_ordered) is collections.OrderedDict
    assert list(got_ordered) == ["b", "a"]
    assert got_default["missing"] == []
    assert "missing" not in default


def test_objects_are_copied_also_frozen_and_slotted_ones():
    plain, frozen, slotted = Plain(), Frozen(torch.ones(1), "f"), Slotted(torch.ones(1))
    got = double([plain, frozen, slotted])
    assert [type(each) for each in got] == [Plain, Frozen, Slotted]
    assert [each.x.tolist()[0] for each in got] == [2, 2, 2]
    assert got[0].note == "n"
    assert got[1].name == "f"
    assert plain.x.tolist() == [1, 1]
    assert frozen.x.tolist() == [1]


def test_what_must_not_be_copied_is_left_alone():
    module = nn.Linear(2, 2)
    for value in (module, Plain, double, torch, Color.red):
        assert double([value])[0] is value
    assert module.weight.grad is None


def test_a_value_that_contains_itself_ends_and_stays_so():
    loop = {"x": torch.ones(1)}
    loop["self"] = loop
    got = double(loop)
    assert got["self"] is got
    shared = [torch.ones(1)]
    one, two = double((shared, shared))
    assert one is two


def test_inputs_are_not_changed():
    inputs = {"a": [torch.ones(1)]}
    double(inputs)
    assert inputs["a"][0].tolist() == [1]
