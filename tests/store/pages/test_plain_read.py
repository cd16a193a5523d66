"""A sealed page is an ordinary safetensors file, and reading it needs no torch."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open
from tests.store.pages.making import capture, write
from tests.waiting import PATIENCE_S

from sonde.store.pages import PageWriter


def test_safetensors_reads_a_sealed_page(tmp_path):
    write(tmp_path, range(3))
    with safe_open(tmp_path / "page_0.safetensors", "numpy") as file:
        names = {name for name in file.keys() if not name.startswith("padding")}  # noqa: SIM118 - it is no mapping
        assert names == {
            f"{at}/{name}" for at in range(3) for name in ("features/layer1/0", "features/layer1/1", "logits")
        }
        np.testing.assert_array_equal(file.get_tensor("2/features/layer1/0"), capture(2)["features"]["layer1"][0])
        assert file.get_tensor("0/features/layer1/1").shape == (0,)
        listed = json.loads(file.metadata()["datapoints"])
    assert [each["datapoint"] for each in listed] == [0, 1, 2]
    assert listed[1]["outputs"]["features"]["dict"]["at"] == 1


def test_every_kind_of_tensor_can_be_seen_from_outside(tmp_path):
    torch = pytest.importorskip("torch")
    odd = {
        "complex": np.array([1 + 2j]),
        "time": np.array(["2020"], "M8[Y]"),
        "text": "x" * 20_000,
        "three": np.zeros(3, "?"),
    }
    with PageWriter(tmp_path, page_bytes=1 << 20) as writer:
        writer.add("a/b", {**capture(3), "odd": odd, "\ud800": np.ones(1)})
        writer.add("a/b", capture(3))
        writer.add("a", {"b": capture(3)})
    with safe_open(tmp_path / "page_0.safetensors", "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found["a%2Fb/logits"].dtype == torch.bfloat16
    assert found["a%2Fb/logits~2"].equal(found["a%2Fb/logits"])
    assert found["a%2Fb/odd/complex"].tolist() == [[1.0, 2.0]]
    assert found["a%2Fb/odd/time"].dtype == torch.uint8


def test_each_tensor_is_aligned_for_its_elements(tmp_path):
    sizes = {"u1": np.zeros(3, "u1"), "f8": np.zeros(5), "f2": np.zeros(1, "f2"), "i4": np.zeros(3, "i4")}
    with PageWriter(tmp_path, page_bytes=1 << 20) as writer:
        for at in range(3):
            writer.add(at, sizes)
    content = (tmp_path / "page_0.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for at in range(3):
        for name, array in sizes.items():
            assert header[f"{at}/{name}"]["data_offsets"][0] % array.itemsize == 0


def test_reading_needs_no_torch(tmp_path):
    write(tmp_path, range(3))
    code = """
import sys
from sonde import load_debug_outputs
read = load_debug_outputs(sys.argv[1])
assert len(read) == 3 and read[1]["features"]["at"] == 1 and read.previews(2) and read.info(0)
from sonde.store.pages import verify_pages
assert verify_pages(sys.argv[1]).ok
assert not {"torch", "joblib", "safetensors"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=PATIENCE_S)
