"""Whatever a module returns is copied, split and stored by rule."""

import dataclasses
import warnings
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from sonde.capture import Capture, copy_outputs, to_plain
from sonde.store.pages import FromTorch, Unsupported, load_debug_outputs

Pair = namedtuple("Pair", "left right")
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2, torch.complex32,
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    hidden: tuple = ()


def store(folder, outputs, **options):
    with Capture(page_bytes=1 << 20, on_error="raise", **options) as capture:
        capture.open(folder)
        capture.add(0, outputs)
    return load_debug_outputs(folder, tensors="torch")[0], load_debug_outputs(folder)[0]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4)], ids=str)
def test_tensors_of_every_type_come_back_bit_for_bit(tmp_path, dtype, shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        size = torch.empty(shape, dtype=dtype).nbytes
        raw = torch.arange(size) % (2 if dtype == torch.bool else 256)
        tensor = raw.to(torch.uint8).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        as_torch, as_numpy = store(tmp_path / "pages", {"x": tensor})
        back = as_torch["x"]
        assert (back.dtype, back.shape, bits(back)) == (dtype, tensor.shape, bits(tensor))
        assert isinstance(as_numpy["x"], np.ndarray)
        if dtype == torch.bfloat16:
            np.testing.assert_array_equal(as_numpy["x"].astype("f4"), tensor.float().numpy())


def test_arrays_stay_arrays_and_tensors_stay_tensors(tmp_path):
    as_torch, _ = store(tmp_path / "pages", {"x": [torch.ones(2), np.ones(2)]})
    assert isinstance(as_torch["x"][0], torch.Tensor)
    assert isinstance(as_torch["x"][1], np.ndarray)


def test_views_are_stored_as_they_look(tmp_path):
    base = torch.arange(24.0).reshape(2, 3, 4)
    views = [base.T if base.ndim == 2 else base.permute(2, 0, 1), base[:, ::2], base[0].expand(5, 3, 4), base[..., 1]]
    as_torch, _ = store(tmp_path / "pages", {"x": views})
    assert all(back.equal(view) for back, view in zip(as_torch["x"], views, strict=True))


def test_complex_views_are_resolved(tmp_path):
    value = torch.tensor([1 + 2j])
    as_torch, _ = store(tmp_path / "pages", {"x": value.conj(), "y": value.conj().imag})
    assert as_torch["x"].tolist() == [1 - 2j]
    assert as_torch["y"].tolist() == [-2.0]


def test_odd_tensors_follow_a_rule(tmp_path):
    dense = torch.eye(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some of these prototypes
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        quantized = torch.quantize_per_tensor(dense, 0.5, 0, torch.qint8)
        values = {"sparse": dense.to_sparse(), "csr": dense.to_sparse_csr(), "nested": nested, "quantized": quantized}
        values["meta"] = torch.empty(3, device="meta")
        values["parameter"] = torch.nn.Parameter(dense)
        as_torch, _ = store(tmp_path / "pages", copy_outputs(values))
    assert all(as_torch[name].equal(dense) for name in ("sparse", "csr", "quantized", "parameter"))
    assert not as_torch["parameter"].requires_grad
    assert [part.tolist() for part in as_torch["nested"]] == [[1.0] * 2, [1.0] * 3]
    assert as_torch["meta"]["text"] == "a tensor of shape (3,) on the meta device"


def test_a_sparse_tensor_too_large_when_dense_leaves_a_mark():
    huge = torch.sparse_coo_tensor([[0]], [1.0], (2**40,), check_invariants=True)
    assert isinstance(to_plain(huge), Unsupported)
    assert isinstance(to_plain(torch.ones(1)), FromTorch)
    assert to_plain("x") == "x"


def test_floating_tensors_are_cast_and_others_are_not(tmp_path):
    values = {"f": torch.tensor([1.5, 2.25]), "i": torch.tensor([70_000]), "b": torch.tensor([True]), "n": np.ones(1)}
    as_torch, _ = store(tmp_path / "pages", values, save_dtype=torch.float16)
    assert as_torch["f"].dtype == torch.float16
    assert as_torch["f"].tolist() == [1.5, 2.25]
    assert as_torch["i"].dtype == torch.int64
    assert as_torch["b"].dtype == torch.bool
    assert as_torch["n"].dtype == np.float64


def test_a_copy_does_not_change_with_its_original():
    tensor, array = torch.full((2,), -1.0, requires_grad=True), np.ones(2)
    output = {
        "a": (tensor, [array]),
        "pair": Pair(tensor, 1),
        "data": Output(tensor, (tensor,)),
        "order": OrderedDict(x=tensor),
    }
    copied = copy_outputs(output)
    with torch.no_grad():
        tensor.relu_()
    array[:] = 0
    assert copied["a"][0].tolist() == [-1.0, -1.0]
    assert not copied["a"][0].requires_grad
    assert copied["a"][1][0].tolist() == [1.0, 1.0]
    assert type(copied["pair"]) is Pair
    assert copied["pair"].left.tolist() == [-1.0, -1.0]
    assert type(copied["data"]) is Output
    assert copied["data"].hidden[0].tolist() == [-1.0, -1.0]
    assert type(copied["order"]) is OrderedDict
    assert output["data"].logits is tensor


def test_copying_passes_other_objects_on():
    marker = object()
    loop = [marker]
    loop.append(loop)
    assert copy_outputs({"x": marker, 3: None})["x"] is marker
    assert copy_outputs(loop)[0] is marker


def test_a_sample_does_not_keep_its_batch_alive(tmp_path):
    capture = Capture(page_bytes=1 << 30)
    capture.add(0, {"x": torch.zeros(64, 1000)[5:6]})
    ((_, outputs),) = capture.waiting
    held = outputs["x"]
    assert held.untyped_storage().nbytes() == 4000
    capture.discard()
    capture.close()


def test_a_mapping_that_resists_copying_becomes_a_dict():
    class Sealed(dict):
        def __setitem__(self, key, value):
            raise TypeError("sealed")

    copied = copy_outputs(Sealed(a=torch.ones(1)))
    assert type(copied) is dict
    assert copied["a"].tolist() == [1.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captures_on_a_device_wait_for_its_stream(tmp_path):
    stream = torch.cuda.Stream()
    with Capture(page_bytes=1 << 20, on_error="raise") as capture:
        capture.open(tmp_path)
        for at in range(20):
            with torch.cuda.stream(stream):
                value = torch.zeros(1 << 20, device="cuda")
                for _ in range(50):
                    value += 1
                capture.add(at, {"x": (value * at).to(torch.bfloat16)})
    read = load_debug_outputs(tmp_path, tensors="torch")
    assert all((read[at]["x"] == torch.tensor(50.0 * at, dtype=torch.bfloat16)).all() for at in range(20))
