"""Tensors that are not plain: converted, read as they lie, or refused. Never altered, never a crash."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from tests.oracles.rows import assert_row, oracle
from tests.stats.measuring import bits, measured, numbers
from torch._subclasses import FakeTensorMode

from sonde.core import schema
from sonde.stats import to_readable
from sonde.stats.adapt import is_dense

CPU_ONLY = "ignore:.*(nested tensors|Sparse CSR|Sparse invariant checks|quantize|deprecated).*"


def check(kernel, tensor, dense):
    row, bins = measured(kernel, tensor)
    expected, expected_bins = oracle(numbers(dense))
    assert_row(row, expected)
    assert (bins == expected_bins).all()


LAYOUTS = {
    "strided": torch.randn(100, 60)[:, ::2],
    "rows of a matrix": torch.randn(100, 60)[10:20],
    "columns of a matrix": torch.randn(100, 60)[:, 5:9],
    "transposed": torch.randn(100, 60).t(),
    "permuted": torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "channels_last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "channels_last with one channel": torch.randn(2, 1, 8, 8).to(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 1000),
    "expanded scalar": torch.tensor(3.0).expand(50),
    "overlapping": torch.randn(20).unfold(0, 5, 1),
    "flipped": torch.randn(50).flip(0),
    "narrowed": torch.randn(50).narrow(0, 3, 7),
    "diagonal": torch.randn(9, 9).diagonal(),
    "no rows": torch.randn(0, 5).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, layout):
    check(kernel, LAYOUTS[layout], LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["transposed", "permuted", "channels_last", "channels_last with one channel"])
def test_dense_layouts_are_not_copied(layout):
    readable = to_readable(LAYOUTS[layout])

    assert readable is not None
    assert readable.values.data_ptr() == LAYOUTS[layout].data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_density_is_that_of_torch(layout):
    from torch._prims_common import is_non_overlapping_and_dense_or_false as torchs_opinion

    tensor = LAYOUTS[layout]

    assert is_dense(tensor) == torchs_opinion(tensor)


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(kernel, dtype):
    check(kernel, torch.arange(120).to(dtype), torch.arange(120))


def test_large_integers_keep_their_value(kernel):
    row, _ = measured(kernel, torch.tensor([2**40 + 1, -(2**50)]))

    assert (row[schema.MAX], row[schema.MIN]) == (2**40 + 1, -(2**50))


def test_booleans(kernel):
    mask = torch.arange(100) % 3 == 0

    check(kernel, mask, mask)


@pytest.mark.parametrize(
    "dtype",
    [getattr(torch, name) for name in FLOAT8 if hasattr(torch, name)],  # torch 2.6 has four of them
    ids=str,
)
def test_float8(kernel, dtype):
    every_value = torch.arange(256, dtype=torch.uint8).view(dtype)

    check(kernel, every_value, every_value.float())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_two_reals_each(kernel, dtype):
    values = torch.randn(100, dtype=dtype)

    check(kernel, values, torch.view_as_real(values))


def test_pending_conjugation_and_negation_are_carried_out(kernel):
    values = torch.complex(torch.rand(50), torch.rand(50))
    conjugated, negated = values.conj(), torch._neg_view(torch.rand(40) + 1)
    assert conjugated.is_conj()
    assert negated.is_neg()

    check(kernel, conjugated, torch.view_as_real(conjugated.resolve_conj()))
    check(kernel, conjugated.imag, -values.imag)
    check(kernel, negated, negated.resolve_neg())


@pytest.mark.filterwarnings(CPU_ONLY)
class TestSparse:
    def test_uncoalesced_values_are_added_up(self, kernel):
        indices = torch.tensor([[0, 1, 1, 0], [2, 0, 0, 1]])
        tensor = torch.sparse_coo_tensor(indices, torch.tensor([3.0, 4.0, -6.0, 0.0]), (5, 7))

        check(kernel, tensor, tensor.to_dense())
        assert not tensor.is_coalesced()

    def test_the_gradient_of_a_sparse_embedding(self, kernel):
        embedding = torch.nn.Embedding(20, 3, sparse=True)
        embedding(torch.tensor([1, 1, 4])).sum().backward()

        check(kernel, embedding.weight.grad, embedding.weight.grad.to_dense())

    @pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
    def test_compressed(self, kernel, layout):
        dense = torch.eye(6) * 3
        block = {"blocksize": (2, 3)} if layout.startswith("b") else {}
        tensor = getattr(dense, f"to_sparse_{layout}")(**block)

        check(kernel, tensor, dense)

    def test_nothing_stored(self, kernel):
        dense = torch.zeros(4, 5)

        check(kernel, dense.to_sparse(), dense)

    def test_complex(self, kernel):
        dense = torch.diag(torch.tensor([1 + 2j, 3 - 4j, 0j]))

        check(kernel, dense.to_sparse(), torch.view_as_real(dense))


@pytest.mark.filterwarnings(CPU_ONLY)
class TestSpecialTensors:
    def test_quantized(self, kernel):
        tensor = torch.quantize_per_tensor(torch.randn(100), 0.1, 3, torch.quint8)

        check(kernel, tensor, tensor.dequantize())

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
    def test_nested(self, kernel, layout):
        parts = [torch.randn(3, 4), torch.randn(5, 4)]

        check(kernel, torch.nested.nested_tensor(parts, layout=layout), torch.cat(parts))

    def test_a_sharded_tensor_is_read_by_its_shard(self, kernel):
        from torch.distributed.tensor import DTensor, Replicate

        shard = torch.randn(20)
        with fake_process_group() as mesh:
            tensor = DTensor.from_local(shard, mesh, [Replicate()])

            check(kernel, tensor, shard)

    def test_subclasses_with_memory_of_their_own(self, kernel):
        class Named(torch.Tensor):
            pass

        values = torch.randn(100)

        check(kernel, values.as_subclass(Named), values)
        check(kernel, torch.nn.Parameter(values), values)

    def test_mkldnn(self, kernel):
        values = torch.randn(8, 8)

        check(kernel, values.to_mkldnn(), values)


def fake_process_group():
    """Return a context that gives a mesh of one rank, without a network."""
    from contextlib import contextmanager

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    @contextmanager
    def group():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,))
        finally:
            dist.destroy_process_group()

    return group()


def unreadable() -> dict[str, torch.Tensor]:
    with FakeTensorMode():
        fake = torch.empty(3)
    packed = getattr(torch, "float4_e2m1fn_x2", None)  # torch 2.8 and later
    return {
        **({} if packed is None else {"float4": torch.zeros(4, dtype=torch.uint8).view(packed)}),
        "meta": torch.empty(3, device="meta"),
        "fake": fake,
        "uninitialised parameter": torch.nn.LazyLinear(3).weight,
        "uninitialised buffer": torch.nn.LazyBatchNorm1d().running_mean,
    }


@pytest.mark.filterwarnings(CPU_ONLY)
@pytest.mark.parametrize("kind", unreadable())
def test_what_cannot_be_read_leaves_its_row_alone(kernel, kind):
    tensor = unreadable()[kind]
    arena = kernel.arena(2)

    assert to_readable(tensor) is None
    assert not kernel.measure_one(tensor, 0, arena)
    kernel.measure([tensor, torch.ones(3)], [0, 1], arena)

    rows, bins = kernel.ship(arena).take()
    assert not rows[0].any()
    assert not bins[0].any()
    assert rows[1, schema.COUNT] == 3


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_tensors_inside_a_transform_are_refused(kernel, transform):
    arena = kernel.arena(1)
    answers = []

    def function(values):
        answers.append(kernel.measure_one(values, 0, arena))
        return values.sum()

    transform(function)(torch.ones(3, 2) if transform is torch.vmap else torch.ones(3))

    assert answers == [False]
    assert not kernel.ship(arena).take()[0].any()


def test_a_refusal_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tensor in unreadable().values():
            assert to_readable(tensor) is None


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
def test_measuring_leaves_no_trace(kernel, layout):
    tensor = LAYOUTS[layout].clone(memory_format=torch.preserve_format).requires_grad_()
    before, version = tensor.detach().clone(), tensor._version
    random_state = torch.get_rng_state()

    measured(kernel, tensor, tensor * 2)

    assert torch.equal(bits(tensor), bits(before))
    assert tensor._version == version
    assert tensor.grad is None
    assert tensor.grad_fn is None
    assert torch.equal(torch.get_rng_state(), random_state)


def test_gradients_flow_through_what_was_measured(kernel):
    leaf = torch.ones(3, requires_grad=True)
    product = leaf * 2
    measured(kernel, product, product[::2])
    product.sum().backward()

    assert torch.equal(leaf.grad, torch.full((3,), 2.0))


def test_inference_tensors_are_read(kernel):
    with torch.inference_mode():
        tensor = torch.full((3,), 2.0)

        row, _ = measured(kernel, tensor)

    assert row[schema.MEAN] == 2.0


def test_half_precision_sums_do_not_overflow_or_stall(kernel):
    tens, ones = torch.full((100_000,), 10.0).half(), torch.ones(4097).bfloat16()
    assert math.isinf(tens.sum())
    assert ones.sum() == 4096

    assert measured(kernel, tens)[0][schema.ABS_SUM] == 1_000_000
    assert measured(kernel, ones)[0][schema.ABS_SUM] == 4097
