"""Captures of CUDA tensors: fetched beside the training, through a little pinned memory, unchanged."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from sonde.capture import Capture
from sonde.capture.fetch import STAGING_BYTES, Fetcher
from sonde.store.pages import load_debug_outputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")


@pytest.fixture
def capture(tmp_path):
    with Capture(page_bytes=1 << 26, on_error="raise", sync=False, save_dtype=torch.float16) as made:
        made.open(tmp_path)
        yield made


def tensors():
    z = torch.randn(5, dtype=torch.complex64, device="cuda")
    return {
        "plain": torch.randn(3, 4, device="cuda"),
        "bfloat16": torch.randn(300, device="cuda").bfloat16(),
        "bool": torch.tensor([True, False], device="cuda"),
        "scalar": torch.tensor(2.5, device="cuda"),
        "empty": torch.zeros(0, 3, device="cuda"),
        "strided": torch.randn(6, 8, device="cuda")[:, ::2],
        "channels last": torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "large": torch.randn(STAGING_BYTES // 4 * 2 + 777, device="cuda"),
        "integers": torch.arange(10, device="cuda"),
    }


def test_tensors_arrive_unchanged():
    values = tensors()
    ready = [torch.cuda.current_stream().record_event()]
    fetched = Fetcher().fetch({"nested": [values, "text"]}, ready)["nested"][0]
    for name, tensor in values.items():
        assert fetched[name].device.type == "cpu"
        assert fetched[name].dtype == tensor.dtype
        assert fetched[name].equal(tensor.cpu()), name


def test_captures_are_cast_on_the_device_and_read_back(capture, tmp_path):
    if importlib.util.find_spec("ml_dtypes") is None:
        pytest.skip("numpy has no bfloat16 without ml_dtypes")
    values = tensors()
    for at in range(3):
        capture.add(at, {"all": values}, info={"score": values["scalar"]})
    assert capture.flush()
    back = load_debug_outputs(tmp_path, tensors="torch")[2]["all"]
    for name, tensor in values.items():
        expected = tensor.half() if tensor.is_floating_point() else tensor
        assert back[name].equal(expected.cpu()), name


def test_writing_does_not_wait_for_what_training_queued_afterwards(capture, tmp_path):
    value = torch.randn(1 << 20, device="cuda")
    capture.add(0, {"x": value})
    assert capture.flush()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    capture.add(1, {"x": value * 2})
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    assert capture.flush()
    assert not torch.cuda.current_stream().query(), "the capture was written while the device still slept"
    torch.cuda.synchronize()
    assert load_debug_outputs(tmp_path, tensors="torch")[1]["x"].equal((value * 2).half().cpu())
    assert torch.cuda.memory_allocated() == before


def test_captures_hold_no_more_device_memory_than_stated(tmp_path):
    """While nothing can be written, captures wait up to their bound; more are dropped and counted."""
    size, bound = 1 << 20, 5 << 20
    options = {"page_bytes": 1 << 26, "max_pending_bytes": bound, "on_full": "drop", "save_dtype": torch.float16}
    with Capture(sync=False, **options) as capture:
        value = torch.randn(size // 4, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        capture.open(tmp_path)
        torch.cuda._sleep(2_000_000_000)  # a second in which the device gives nothing away
        taken = [capture.add(at, {"x": value}) for at in range(30)]
        assert capture.pending_bytes <= bound
        assert torch.cuda.max_memory_allocated() - before <= bound + size, "half a capture each, in half precision"
        assert taken[:9] == [True] * 9
        assert capture.dropped == taken.count(False) > 0
        assert capture.flush()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
    assert len(load_debug_outputs(tmp_path)) == taken.count(True)
