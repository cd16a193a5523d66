"""What of the CUDA kernels can be checked on any machine."""

from __future__ import annotations

import ctypes
import re
from importlib import resources

import numpy as np
import pytest
import torch

from sonde.stats.cuda import DeviceKernel, NoDeviceKernel, batches, cuda_kernel
from sonde.stats.protocol import Changes


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


class OnTheHost(DeviceKernel):
    """What all device kernels share, with CPU tensors; reads through the addresses it is given."""

    name = "pretending"
    dtypes = frozenset((torch.float32,))

    def __init__(self):
        self.index = -1  # what CPU tensors say of their device
        self.launches = 0
        self.seen, self.changes = {}, {}

    def arena(self, capacity):
        raise NotImplementedError

    def launch(self, dtype, group, arena, histogram):
        self.launches += 1
        for pointer, numel, row in zip(group.pointers, group.numels, group.rows, strict=True):
            self.seen[row] = at(pointer, numel)

    def launch_change(self, dtype, group, arena, histogram):
        self.launch(dtype, group, arena, histogram)
        for index, row in enumerate(group.change_rows):
            now = at(group.pointers[index], group.numels[index])
            self.changes[row] = now - at(group.shadows[index], group.numels[index])


def at(pointer, numel):
    return np.ctypeslib.as_array((ctypes.c_float * numel).from_address(pointer)).copy()


def layouts():
    images = torch.randn(4, 3, 5, 6)
    return [
        torch.randn(7),
        images.contiguous(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
        images[:1, :, :1, :1].contiguous(memory_format=torch.channels_last),
    ]


def test_dense_tensors_of_any_layout_are_one_launch():
    kernel, tensors = OnTheHost(), layouts()
    assert kernel._measure(tensors, range(4), None, True) == 4
    assert kernel.launches == 1
    for row, tensor in enumerate(tensors):
        np.testing.assert_array_equal(np.sort(kernel.seen[row]), np.sort(tensor.flatten().numpy()))


def test_tensors_with_gaps_or_flipped_signs_are_converted():
    kernel = OnTheHost()
    flipped = torch.randn(3, 2, dtype=torch.complex64).t().conj().imag
    tensors = [torch.randn(4, 6)[:, ::2], flipped, torch.randn(2, 1).expand(2, 5), *layouts()]
    kernel._measure(tensors, range(len(tensors)), None, True)
    for row, tensor in enumerate(tensors):
        np.testing.assert_array_equal(np.sort(kernel.seen[row]), np.sort(tensor.flatten().numpy()))


def test_changes_pair_the_same_elements():
    kernel, tensors = OnTheHost(), layouts()
    shadows = [torch.randn_like(tensor) for tensor in tensors]  # lie as the tensors do
    expected = [np.sort((tensor - shadow).flatten().numpy()) for tensor, shadow in zip(tensors, shadows, strict=True)]
    kernel._launch_changes(Changes(tensors, shadows, range(4), range(4, 8)), None, True)
    assert kernel.launches == 1
    shadows[1] = torch.randn(4, 3, 5, 6)  # lies otherwise
    other = np.sort((tensors[1] - shadows[1]).flatten().numpy())
    again = OnTheHost()
    again._launch_changes(Changes(tensors, shadows, range(4), range(4, 8)), None, True)
    for row in range(4):
        np.testing.assert_array_equal(np.sort(kernel.changes[4 + row]), expected[row])
    np.testing.assert_array_equal(np.sort(again.seen[5]), other)
    assert shadows[1].equal(tensors[1]), "refreshed by torch"
