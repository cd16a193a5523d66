"""What of the CUDA kernels can be checked on any machine."""

from __future__ import annotations

import re
from importlib import resources

import pytest
import torch

from sonde.stats.cuda import NoDeviceKernel, batches, cuda_kernel


def test_asking_for_a_kernel_says_what_is_wrong():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(NoDeviceKernel, match="cuda:0 is not a CUDA device"):
        cuda_kernel(0)
    with pytest.raises(NoDeviceKernel, match="cpu"):
        cuda_kernel("cpu")


def test_source_and_host_agree_on_numbers():
    source = resources.files("sonde.stats.cuda").joinpath("summary.cu").read_text()
    for name in ("SUMMARY_THREADS", "CHANGE_THREADS", "SUMMARY_TENSORS", "CHANGE_TENSORS"):
        [value] = re.findall(rf"constexpr int {name} = (\d+)", source)
        assert int(value) == getattr(batches, name)


def test_argument_blocks_fit_every_driver():
    [summary] = batches.make_batches([5], [0], None, 100)
    [change] = batches.make_batches([5], [0], [1], 100)
    assert len(summary.block) == 48 + 24 * batches.SUMMARY_TENSORS <= 4096
    assert len(change.block) == 48 + 36 * batches.CHANGE_TENSORS <= 4096


def test_no_row_is_written_twice_in_a_launch():
    assert list(batches.pieces([1, 2, 1, 3], None, 100)) == [(0, 2), (2, 4)]
    assert list(batches.pieces([1, 2, 3], [4, 1, 5], 100)) == [(0, 1), (1, 3)]
    assert list(batches.pieces(range(5), None, 2)) == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("elements", [0, 1, 10**4, 10**6, 10**9, 10**11])
def test_a_launch_has_few_blocks(elements):
    chunk = batches.chunk_for(elements, 528)
    assert chunk % 4096 == 0
    assert batches.blocks_of(elements, chunk) <= 2 * 528
    many = [elements // 100] * 100
    [batch] = batches.make_batches(many, range(100), None, 528)
    assert batch.blocks <= batches.most_blocks(528)
