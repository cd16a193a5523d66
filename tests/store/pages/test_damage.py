"""Damaged, truncated and hostile pages: a clear error, no code, and the other pages stay readable."""

import contextlib
import json
import random
import shutil
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.store.pages.making import capture, same, write

from sonde.errors import RunDamaged
from sonde.store import framing
from sonde.store.pages import dtypes, load_debug_outputs, nodes, record, verify_pages

slow = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of two sealed pages: datapoints 0 and 1, then 2."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder, range(3), page_bytes=520)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["page_0.safetensors", "page_1.safetensors"]
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "pages")


def read_all(folder):
    """Read what can be read, and return how much of it was not what was written."""
    read = load_debug_outputs(folder)
    wrong = errors = 0
    for datapoint in list(read):
        try:
            outputs = read[datapoint]
            expected = capture(datapoint) if datapoint in (0, 1, 2) else {}
            wrong += not all(same(outputs[name], value) for name, value in expected.items())
            read.previews(datapoint)
            read.info(datapoint)
        except RunDamaged as error:
            errors += str(folder) in str(error)
    return read, wrong, errors


def test_a_sealed_page_cut_at_any_byte_is_noticed_and_costs_only_itself(folder):
    path = folder / "page_0.safetensors"
    content = path.read_bytes()
    lost = 0
    for cut in [*range(24), *range(24, len(content), 211), len(content) - 1]:
        path.write_bytes(content[:cut])
        read, wrong, errors = read_all(folder)
        lost += errors
        assert (len(read), wrong) == (3, 0)
        assert all(same(read[2][name], value) for name, value in capture(2).items())
        assert len(read.previews(0)["features"]) == 2, "previews need no page"
        report = verify_pages(folder)
        assert not report.ok
        assert all("page_0" in str(problem.file) for problem in report.problems)
    assert lost


def test_an_index_cut_at_any_byte_costs_nothing(folder):
    path = folder / "page_0.index"
    content = path.read_bytes()
    for cut in [*range(0, len(content), 61), len(content) - 1]:
        path.write_bytes(content[:cut])
        read, wrong, errors = read_all(folder)
        assert (len(read), wrong, errors) == (3, 0, 0)
        assert not verify_pages(folder).ok


@pytest.mark.parametrize("name", ["page_0.safetensors", "page_0.index"])
def test_no_flipped_bit_goes_unnoticed(folder, name):
    path = folder / name
    content = path.read_bytes()
    chance = random.Random(3)
    places = {0, 7, 8, 9, len(content) - 1, *(chance.randrange(len(content)) for _ in range(150))}
    for at in places:
        flipped = bytearray(content)
        flipped[at] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        read, wrong, errors = read_all(folder)
        assert wrong == 0, "a value that was never written must not be shown"
        assert len(read) == 3
        assert errors == 0 or name != "page_0.index", "a page can do without its index"
        assert not verify_pages(folder).ok, at


def test_lost_files_are_named(folder):
    (folder / "page_0.index").unlink()
    read, wrong, errors = read_all(folder)
    assert (len(read), wrong, errors) == (3, 0, 0)
    assert read.previews(0)["features"]["layer1/0"].stats["count"] == 60
    (folder / "page_0.safetensors").unlink()
    assert "page_0.safetensors" in str(verify_pages(folder))
    assert list(load_debug_outputs(folder)) == [2]


def test_a_page_of_another_tool_is_not_ours(folder):
    from safetensors.numpy import save_file

    (folder / "page_0.index").unlink()
    save_file({"x": np.ones(3)}, folder / "page_0.safetensors")
    read = load_debug_outputs(folder)
    assert list(read) == [2]
    assert "page_0.safetensors" in read.problems[0]


def test_a_later_version_is_refused_by_name(folder):
    path = folder / "page_0.index"
    told = {"format": "sonde-page", "schema_version": 99, "reserved": 16384}
    path.write_bytes(record.encode_page(told))
    (folder / "page_0.safetensors").unlink()
    assert "version 99" in load_debug_outputs(folder).problems[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
tags = st.sampled_from(
    ["dict", "pairs", "tuple", "set", "int", "float", "complex", "bytes", "scalar", "objects", "tensor", "unsupported"]
)
node = st.recursive(
    json_values, lambda inner: st.dictionaries(tags, inner, min_size=1, max_size=1) | st.lists(inner, max_size=3)
)
place = st.tuples(
    st.text(max_size=4) | st.none(),
    st.sampled_from(
        ["float32", "<U4", "O", "|O8", "object", "bfloat16", "uint8", "m8", [["a", "<f4"]], [["a", "O"]], 3]
    ),
    st.lists(st.integers(-1, 2**65), max_size=3),
    st.integers(-1, 2**66),
    st.integers(-1, 2**66),
    st.integers(0, 2**32),
    st.sampled_from(["", "torch.float32", "python.list", "python.str", "python.bytes", "torch.load"]),
).map(list)


@slow
@given(outputs=st.dictionaries(st.text(max_size=3), node, max_size=2), places=st.lists(place, max_size=2), info=node)
@example({"a": {"tensor": 0}}, [["x", "uint8", [2**40], 0, 2**40, 0, ""]], None)
@example({"a": {"tensor": 0}}, [["x", "uint8", [8], 0, 8, 0, ""]], None)
@example({"a": {"tensor": 10**30}}, [], {"objects": [[2**62], []]})
@example({"a": {"pairs": [[[1], 2]]}}, [], {"pairs": 3})
@example({"a": {"scalar": [[["a", "O"]], "AAAA"]}}, [], {"set": [[1]]})
@example({"a": {"int": "9" * 5000}}, [], {"tuple": {"dict": 1}})
def test_an_absurd_record_gives_an_error_and_no_more(tmp_path_factory, outputs, places, info):
    folder = tmp_path_factory.mktemp("hostile")
    described = {"datapoint": 0, "time": 1.0, "outputs": outputs, "info": info, "tensors": places}
    start = record.encode_page({"format": "sonde-page", "schema_version": 1, "reserved": 16384})
    text = json.dumps(described).encode()
    lines = [start, record.encode(1, b"0", text, [b""] * len(places))]
    (folder / "page_0.index").write_bytes(b"".join(lines))
    (folder / "page_0.safetensors").write_bytes(bytes(20000))
    read = load_debug_outputs(folder)
    for use in (
        lambda: dict(read[0]),
        lambda: read.previews(0),
        lambda: read.info(0),
        lambda: read.tensor(0, "a", "b"),
    ):
        with contextlib.suppress(RunDamaged, KeyError):
            use()
    verify_pages(folder)


@slow
@given(payload=st.binary(max_size=200), kind=st.sampled_from([1, 2, 16, 17, 18, 99]))
def test_any_payload_is_survived(tmp_path_factory, payload, kind):
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "page_0.journal").write_bytes(framing.encode(kind, 0, 0, [payload]))
    (folder / "page_0.open").write_bytes(bytes(100))
    read_all(folder)
    verify_pages(folder)


@slow
@given(
    header=st.dictionaries(st.text(max_size=5), json_values, max_size=4), metadata=json_values, datapoints=json_values
)
@example({"x": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**64]}}, None, [])
@example({}, {"format": "sonde-page", "schema_version": "1", "datapoints": "[" * 100_000}, [])
def test_an_absurd_header_gives_an_error_and_no_more(tmp_path_factory, header, metadata, datapoints):
    folder = tmp_path_factory.mktemp("hostile")
    if not isinstance(metadata, dict):
        metadata = {"format": "sonde-page", "schema_version": "1", "datapoints": json.dumps(datapoints)}
    text = json.dumps({"__metadata__": {"check": "00000000", **metadata}, **header}, separators=(",", ":")).encode()
    text = text.replace(b"00000000", f"{zlib.crc32(text):08x}".encode(), 1)
    (folder / "page_0.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    read = load_debug_outputs(folder)
    assert len(read) == 0
    assert not verify_pages(folder).ok


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 10**9])
def test_a_header_of_any_stated_length_is_survived(folder, length):
    (folder / "page_0.index").unlink()
    path = folder / "page_0.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    read = load_debug_outputs(folder)
    assert list(read) == [2]
    assert "should be a header" in read.problems[0]


@pytest.mark.parametrize(
    "text", ["O", "object", "|O", "<O8", "f4; import os", "[('a','O')]", "", "<f4,<f4", "V-3", "U99999999999"]
)
def test_no_type_that_is_more_than_bytes_is_taken(text):
    assert dtypes.parse(text) is None
    assert dtypes.parse([["a", text]]) is None


def test_a_structure_deeper_than_any_writer_goes_is_refused():
    deep = 1
    for _ in range(400):
        deep = {"tuple": [deep]}
    with pytest.raises(nodes.BadNode, match="too deep"):
        nodes.Decoder(lambda number: number).decode(deep)
