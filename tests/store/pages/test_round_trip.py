"""What goes into a page comes out as it was."""

import dataclasses
import math
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.store.pages.making import DTYPES, capture, datapoints, same, values, write

from sonde.errors import OptionError
from sonde.store.pages import PageWriter, Unsupported, load_debug_outputs

Point = namedtuple("Point", "x y")
slow = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def round_trip(folder, value, **options):
    with PageWriter(folder, page_bytes=1 << 20, sync=False, **options) as writer:
        writer.add(0, {"it": value})
    return load_debug_outputs(folder)[0]["it"]


@slow
@given(captures=st.lists(st.tuples(datapoints, values, values), min_size=1, max_size=3))
@example(captures=[(1, {"a": {}}, []), ("1", np.zeros((0, 3)), ()), (1, {"1": 1, 1: 2}, -0.0)])
@example(captures=[("\ud800", {"\udfff/": "\ud800"}, np.zeros(2))])
def test_nested_values_come_back_exactly_from_open_and_from_sealed_pages(tmp_path_factory, captures):
    folder = tmp_path_factory.mktemp("pages")
    writer = PageWriter(folder, page_bytes=1 << 20, sync=False)
    for datapoint, one, two in captures:
        writer.add(datapoint, {"one": one, "two": {"deep": [two]}}, info={"value": one})
    latest = {datapoint: (one, two) for datapoint, one, two in captures}
    for _ in range(2):
        read = load_debug_outputs(folder)
        assert set(read) == set(latest)
        for datapoint, (one, two) in latest.items():
            assert same(read[datapoint]["one"], one)
            assert same(read[datapoint]["two"], {"deep": [two]})
            assert same(read.info(datapoint), {"value": one})
        assert not read.problems
        writer.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_every_type_of_element_comes_back(tmp_path, dtype, shape):
    array = np.zeros(shape, dtype) if dtype.fields else (np.arange(math.prod(shape)) % 2).reshape(shape).astype(dtype)
    assert same(round_trip(tmp_path / "pages", [array, array[...]]), [array, array])


def test_arrays_that_are_not_in_order_come_back(tmp_path):
    array = np.arange(24.0).reshape(2, 3, 4)
    back = round_trip(tmp_path / "pages", [array.T, array[:, ::-2], np.broadcast_to(array[0], (3, 3, 4))])
    np.testing.assert_array_equal(back[0], array.T)
    np.testing.assert_array_equal(back[1], array[:, ::-2])
    np.testing.assert_array_equal(back[2], np.broadcast_to(array[0], (3, 3, 4)))


def test_what_was_read_is_the_callers_to_change(tmp_path):
    back = round_trip(tmp_path / "pages", np.zeros(3))
    back += 1


def test_long_values_come_back(tmp_path):
    value = {
        "bytes": bytes(range(256)) * 100,
        "text": "häß\udc80" * 9000,
        "floats": [0.1, math.nan, -0.0, math.inf] * 1000,
        "integers": list(range(-2000, 2000)),
        "mixed": [1, 2.0, True] * 1000,
        "too large": [2**64] * 2000,
        "huge": 7**9000,
    }
    assert same(round_trip(tmp_path / "pages", value), value)


def test_kinds_that_only_resemble_others_become_those(tmp_path):
    @dataclasses.dataclass
    class Output:
        logits: object
        loss: float

    value = [Point(1, 2), OrderedDict(a=1), Output(np.ones(2), 0.5), bytearray(b"x"), np.float64(2.5)]
    back = round_trip(tmp_path / "pages", value)
    assert back[:2] == [(1, 2), {"a": 1}]
    assert type(back[0]) is tuple
    assert same(back[2], {"logits": np.ones(2), "loss": 0.5})
    assert back[3] == b"x"
    assert same(back[4], np.float64(2.5))


class Stubborn:
    def __repr__(self):
        raise RuntimeError


def test_what_cannot_be_stored_leaves_a_mark_and_the_rest(tmp_path):
    loop = [1]
    loop.append(loop)
    deep = []
    for _ in range(500):
        deep = [deep]
    value = {
        "good": np.ones(2),
        "object": object(),
        "stubborn": Stubborn(),
        "loop": loop,
        "deep": deep,
        "module": math,
        "masked": np.ma.masked_array([1, 2], [True, False]),
        "nothing": len,
    }
    back = round_trip(tmp_path / "pages", value)
    assert same(back["good"], np.ones(2))
    assert back["object"]["unsupported"] == "object"
    assert back["object"]["text"].startswith("<object object")
    assert isinstance(back["object"], Unsupported)
    assert back["stubborn"]["unsupported"].endswith("Stubborn")
    assert all(isinstance(back[name], Unsupported) for name in ("module", "masked", "nothing"))
    assert back["loop"][0] == 1


def test_objects_in_arrays_come_back(tmp_path):
    array = np.array([[1, "a"], [None, 2.5]], dtype=object)
    assert round_trip(tmp_path / "pages", array).tolist() == array.tolist()


def test_a_structure_beyond_all_measure_leaves_a_mark(tmp_path):
    wide = [{"a": 1}] * 300_000
    long = {str(at): "x" * 100 for at in range(60_000)}
    with PageWriter(tmp_path / "pages", page_bytes=1 << 20, sync=False) as writer:
        writer.add(0, {"wide": wide, "long": long, "good": 1})
    back = load_debug_outputs(tmp_path / "pages")[0]
    assert "more than 200,000 values" in back["wide"]["text"]
    assert "bytes of structure" in back["long"]["text"]
    assert back["good"] == 1


@pytest.mark.parametrize("bad", [None, 1.5, (1,), True, 2**63, object()])
def test_a_datapoint_is_a_number_or_a_name(tmp_path, bad):
    with PageWriter(tmp_path, page_bytes=1) as writer, pytest.raises(OptionError):
        writer.add(bad, {})


def test_one_tensor_can_be_asked_for(tmp_path):
    write(tmp_path, [1, 2])
    read = load_debug_outputs(tmp_path)
    expected = capture(2)["features"]["layer1"][0]
    for path in ("layer1/0", ("layer1", 0), ["layer1", "0"]):
        assert same(read.tensor(2, "features", path), expected)
    assert same(read.tensor(2, "logits"), capture(2)["logits"])
    assert read.tensor(2, "stats", "names/0") == "a"
    with pytest.raises(KeyError, match="its tensors: features/layer1/0, features/layer1/1, logits"):
        read.tensor(2, "features", "layer2/0")
    with pytest.raises(KeyError):
        read.tensor(3, "features")


def test_keys_with_slashes_and_numbers_can_be_asked_for(tmp_path):
    value = {"a/b": {7: np.ones(1)}, "%": np.zeros(1), 3: 4}
    with PageWriter(tmp_path, page_bytes=9) as writer:
        writer.add("x/y", {"d": value})
    read = load_debug_outputs(tmp_path)
    assert list(read.previews("x/y")["d"]) == ["a%2Fb/7", "%25"]
    for path in read.previews("x/y")["d"]:
        assert isinstance(read.tensor("x/y", "d", path), np.ndarray)
    assert read.tensor("x/y", "d", ("a/b", 7)) == [1.0]
    assert read.tensor("x/y", "d", "3") == 4
