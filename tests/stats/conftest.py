from __future__ import annotations

import pytest
import torch
from tests.stats.measuring import make_kernel

from sonde.stats import library
from sonde.stats.protocol import Kernel


@pytest.fixture(autouse=True)
def _keep_level():
    native = library.load()
    before = native.level if native else None
    yield
    if native and before:
        native.use_level(before)


@pytest.fixture(params=["native-avx512", "native-avx2", "native-baseline", "torch", "torch-device"])
def kernel(request) -> Kernel:
    return make_kernel(request.param)


@pytest.fixture(params=["native-avx512", "native-avx2", "native-baseline"])
def native_kernel(request) -> Kernel:
    return make_kernel(request.param)


@pytest.fixture
def threads():
    """Set the number of torch's threads, and put it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
