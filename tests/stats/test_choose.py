"""Which kernel serves a device, and what happens where the native library is missing."""

from __future__ import annotations

import pytest
import torch

from sonde.errors import OptionError
from sonde.stats import NativeKernel, TorchKernel, kernel_for, library

CPU = torch.device("cpu")


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """Make the library look as if it had not been built."""
    library.load.cache_clear()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    yield tmp_path
    library.load.cache_clear()


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch):
    monkeypatch.delenv("SONDE_KERNEL", raising=False)


def test_the_native_kernel_is_the_first_choice():
    assert isinstance(kernel_for(CPU), NativeKernel)


def test_the_environment_can_insist(monkeypatch):
    monkeypatch.setenv("SONDE_KERNEL", "torch")
    assert isinstance(kernel_for(CPU), TorchKernel)

    monkeypatch.setenv("SONDE_KERNEL", "native")
    assert isinstance(kernel_for(CPU), NativeKernel)


def test_a_choice_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setenv("SONDE_KERNEL", "nativ")

    for device in (CPU, torch.device("cuda", 0), torch.device("xla", 0)):
        with pytest.raises(OptionError, match="'nativ' is not one of: native, cuda, torch"):
            kernel_for(device)


def test_torch_operations_can_be_chosen_for_any_device(monkeypatch):
    monkeypatch.setenv("SONDE_KERNEL", "torch")

    for device in (torch.device("cuda", 0), torch.device("xla", 0)):
        kernel = kernel_for(device)
        assert isinstance(kernel, TorchKernel)
        assert kernel.device == device


def test_a_cuda_device_that_does_not_work_gets_torch_operations(caplog):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    kernel = kernel_for(torch.device("cuda", 0))

    assert isinstance(kernel, TorchKernel)
    assert not kernel.reads_numbers
    assert "cuda:0 is not a CUDA device that torch can use here; torch operations do the work" in caplog.text


def test_a_choice_for_other_devices_does_not_concern_the_cpu(monkeypatch):
    monkeypatch.setenv("SONDE_KERNEL", "cuda")

    assert isinstance(kernel_for(CPU), NativeKernel)


def test_without_the_library_torch_does_the_work(no_library):
    assert isinstance(kernel_for(CPU), TorchKernel)


def test_a_library_that_cannot_be_loaded_is_not_a_library(no_library):
    (no_library / f"_native{library.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")

    assert isinstance(kernel_for(CPU), TorchKernel)


def test_insisting_on_a_library_that_is_missing_names_the_cure(no_library, monkeypatch):
    monkeypatch.setenv("SONDE_KERNEL", "native")

    with pytest.raises(OptionError, match=r"not built.*C compiler.*unset SONDE_KERNEL"):
        kernel_for(CPU)


def test_a_device_without_a_kernel_of_its_own_gets_torch_operations():
    kernel = kernel_for(torch.device("xla", 0))

    assert isinstance(kernel, TorchKernel)
    assert not kernel.reads_numbers
    assert kernel.device == torch.device("xla", 0)


def test_every_kernel_has_a_name_of_its_own():
    native = library.load()
    assert native is not None
    assert [kernel.name for kernel in (NativeKernel(native), TorchKernel())] == ["native", "torch"]


def test_the_best_level_is_used_and_unknown_ones_are_refused():
    native = library.load()
    assert native is not None

    available = [level for level in library.LEVELS if native.use_level(level)]

    assert available[-1] == "baseline"
    assert library.Library(native.path).level == available[0]
    assert not native.use_level("quantum")
    assert native.level == available[0]


def test_tensors_on_another_device_are_refused_by_host_kernels():
    # A meta tensor stands in for one on a GPU: both are not in the memory of the host.
    for kernel in (kernel_for(CPU), TorchKernel()):
        assert not kernel.measure_one(torch.empty(3, device="meta"), 0, kernel.arena(1))
