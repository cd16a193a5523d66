from __future__ import annotations

import collections
import copy

import pytest
import torch
from torch import nn

from sonde.errors import OptionError
from sonde.training import build_from_config

Pair = collections.namedtuple("Pair", "left right")


class Thing:
    def __init__(self, **args):
        self.args = args


class Settings(dict):
    """A settings object that is also a dict."""


def described(**args):
    return {"class": Thing, "args": args}


def test_class_and_args_become_an_object():
    built = build_from_config(described(a=1, b="two"))
    assert type(built) is Thing
    assert built.args == {"a": 1, "b": "two"}


def test_keyword_arguments_win_over_args():
    assert build_from_config(described(a=1, b=2), b=3, c=4).args == {"a": 1, "b": 3, "c": 4}


def test_an_argument_that_is_replaced_is_not_built():
    def explode():
        raise AssertionError("built in vain")

    assert build_from_config(described(a={"class": explode, "args": {}}), a=1).args == {"a": 1}


def test_descriptions_inside_are_built_from_the_inside_out():
    config = described(a=[described(n=1)], b={"c": (described(n=2), 5)}, d=described(e=described(n=3)))
    built = build_from_config(config)
    assert built.args["a"][0].args == {"n": 1}
    assert built.args["b"]["c"][0].args == {"n": 2}
    assert built.args["b"]["c"][1] == 5
    assert built.args["d"].args["e"].args == {"n": 3}


def test_without_recursion_args_are_handed_on_as_they_are():
    built = build_from_config(described(a=described(n=1)), recursive=False)
    assert built.args == {"a": described(n=1)}


def test_the_items_of_a_debuggers_config_are_built_inside_their_dicts():
    items = [{"name": "features", "debugger_config": described(layer_name="backbone")}]
    built = build_from_config(described(debuggers_config=items))
    (item,) = built.args["debuggers_config"]
    assert item["name"] == "features"
    assert isinstance(item["debugger_config"], Thing)


@pytest.mark.parametrize(
    "value", [3, None, "text", [1, 2], {"class": 1}, {"class": Thing, "args": {}, "more": 1}, Thing()]
)
def test_everything_else_comes_back_as_it_is(value):
    assert build_from_config(value) == value


def test_an_object_that_is_built_already_passes_through():
    thing = Thing()
    assert build_from_config(thing, model=1) is thing
    assert build_from_config(described(a=thing)).args["a"] is thing


def test_the_config_is_never_changed():
    def meddle(items, table):
        items.append(1)
        table["x"] = 1
        return items

    config = {"class": meddle, "args": {"items": [described()], "table": {}}}
    before = copy.deepcopy(config)
    build_from_config(config)
    assert config.keys() == before.keys()
    assert config["args"]["table"] == {}
    assert len(config["args"]["items"]) == 1
    assert config["args"]["items"][0] == described()


def test_modules_parameters_and_datasets_are_shared():
    module, parameter = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    built = build_from_config(described(module=module, parameters=[parameter]))
    assert built.args["module"] is module
    assert built.args["parameters"][0] is parameter


def test_containers_keep_their_kind():
    ordered = collections.OrderedDict(b=described(n=1), a=2)
    default = collections.defaultdict(list, a=described(n=1))
    built = build_from_config(described(pair=Pair(described(n=1), 2), ordered=ordered, default=default)).args
    assert type(built["pair"]) is Pair
    assert built["pair"].left.args == {"n": 1}
    assert type(built["ordered"]) is collections.OrderedDict
    assert list(built["ordered"]) == ["b", "a"]
    assert built["default"]["new"] == []
    assert built["default"]["a"].args == {"n": 1}


def test_a_settings_object_goes_through_untouched():
    settings = Settings({"class": Thing, "args": {"n": 1}})
    assert build_from_config(settings) is settings
    assert build_from_config(described(a=settings)).args["a"] is settings


def test_a_class_may_be_an_import_path():
    assert isinstance(build_from_config({"class": "torch.nn.ReLU", "args": {}}), nn.ReLU)
    inside = build_from_config({"class": "torch.Tensor.new_zeros", "args": {}, "x": 1})
    assert inside == {"class": "torch.Tensor.new_zeros", "args": {}, "x": 1}
    assert build_from_config({"class": "datetime.datetime.now", "args": {}}).year > 2000


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.nn.Linnear", r"Cannot import 'torch.nn.Linnear': torch.nn has no Linnear \(nearest: .*Linear"),
        ("no.such.Thing", "Cannot import 'no.such.Thing': No module named 'no"),
        ("Thing", "'Thing' is not an import path; write it as package.module.Name"),
        (5, "'class' takes a class, a function or an import path; got 5"),
    ],
)
def test_a_class_that_cannot_be_found_is_named(target, message):
    with pytest.raises(OptionError, match=message):
        build_from_config({"class": target, "args": {}})


def test_arguments_that_do_not_fit_are_named_with_those_that_would():
    with pytest.raises(
        OptionError, match=r"Linear cannot be built from its config: .*in_featres.*nearest: in_features"
    ):
        build_from_config({"class": nn.Linear, "args": {"in_featres": 2, "out_features": 2}})
    with pytest.raises(OptionError, match=r"'args' of .*Thing takes a dict"):
        build_from_config({"class": Thing, "args": [1]})


def test_an_error_inside_a_constructor_comes_through():
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build_from_config({"class": fail, "args": {}})
