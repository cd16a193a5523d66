from sonde.analysis import ModelOrder, layer_of
from sonde.records import RunHeader, Site


def header(**model):
    return RunHeader(schema_version=1, created=0.0, sonde_version="0", model=model)


def site(name, quantity="gradient", id=0):
    return Site(id=id, name=name, quantity=quantity)


def test_layers_come_in_the_order_of_the_model():
    modules = [{"name": name, "kind": "Linear"} for name in ("stem", "body.10", "body.2", "head")]
    order = ModelOrder(header(modules=modules), [site("head.weight"), site("stem.weight")])
    names = ["head", "body.2", "stem", "body.10"]
    assert sorted(names, key=order.of_layer) == ["stem", "body.10", "body.2", "head"]
    assert order.kind("stem") == "Linear"
    assert order.kind("elsewhere") == ""


def test_without_a_model_the_order_is_that_of_the_sites():
    sites = [site(name, id=i) for i, name in enumerate(["b.weight", "a.weight", "a.bias"])]
    order = ModelOrder(header(), sites)
    assert sorted(["a", "b"], key=order.of_layer) == ["b", "a"]
    shuffled = [sites[2], sites[0], sites[1]]
    assert sorted(shuffled, key=order.of_site) == sites


def test_a_strange_header_does_no_harm():
    order = ModelOrder(header(modules="everything", parameters=[3, None, {"shape": 1}]), [site("a.weight")])
    assert order.of_layer("a") <= order.of_layer("unknown")


def test_a_parameter_belongs_to_its_owner_and_an_output_to_its_module():
    assert layer_of(site("encoder.0.weight")) == "encoder.0"
    assert layer_of(site("encoder.0", "output")) == "encoder.0"
    assert layer_of(site("scale", "parameter")) == ""
