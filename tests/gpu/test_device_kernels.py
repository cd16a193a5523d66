"""Every CUDA kernel against a float64 oracle on the host, written apart from all kernels.

Bounds: counts, extremes and histogram are exact. abs_sum is right to 1e-6 of itself, the mean to 1e-6 of the mean
magnitude, m2 to 1e-5 of itself.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from sonde.core import schema
from sonde.stats.cuda import DeviceKernel, NoDeviceKernel, cuda_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")

MEAN_BOUND, M2_BOUND, ABS_SUM_BOUND = 1e-6, 1e-5, 1e-6
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
WIDE_RANGE = {torch.float32, torch.bfloat16, torch.float64}


@pytest.fixture(scope="module")
def kernel():
    return cuda_kernel("cuda")


def oracle(values) -> tuple[np.ndarray, np.ndarray]:
    """Summarise in extended precision, element by element definition."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    row, bins = np.zeros(12), np.zeros(64, dtype=np.uint64)
    good = x[np.isfinite(x)]
    row[:7] = (
        1,
        x.size,
        np.count_nonzero(np.isnan(x)),
        np.count_nonzero(x == np.inf),
        np.count_nonzero(x == -np.inf),
        np.count_nonzero(good == 0),
        np.count_nonzero(np.abs(good) >= 1),
    )
    if good.size:
        exact = good.astype(np.longdouble)
        mean = exact.sum() / good.size
        row[7:] = good.min(), good.max(), mean, np.square(exact - mean).sum(), np.abs(exact).sum()
    size = np.abs(good[good != 0])
    for k in range(64):
        low, high = (0.0 if k == 0 else 2.0 ** (k - 47)), (np.inf if k == 63 else 2.0 ** (k - 46))
        bins[k] = np.count_nonzero((size >= low) & (size < high))
    return row, bins


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements as float64."""
    values = tensor.detach()
    if values.dtype.itemsize == 1:
        values = values.float()
    return values.double().cpu().numpy()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().reshape(-1).contiguous().view(torch.uint8)


def check(row, bins, values, histogram=True, expected=None):
    want, want_bins = oracle(values) if expected is None else expected
    np.testing.assert_array_equal(row[:9], want[:9])
    finite = max(1.0, want[1] - want[2] - want[3] - want[4])
    tiny = 1e-300
    assert abs(row[9] - want[9]) <= MEAN_BOUND * want[11] / finite + tiny, f"mean {row[9]} for {want[9]}"
    square = want[9] ** 2 * finite
    assert abs(row[10] - want[10]) <= M2_BOUND * want[10] + 1e-24 * square + tiny, f"m2 {row[10]} for {want[10]}"
    assert abs(row[11] - want[11]) <= ABS_SUM_BOUND * want[11] + tiny, f"abs_sum {row[11]} for {want[11]}"
    np.testing.assert_array_equal(bins, want_bins if histogram else np.zeros(64))


def measure(kernel: DeviceKernel, tensors, histogram=True):
    arena = kernel.arena(len(tensors))
    kernel.measure(tensors, range(len(tensors)), arena, histogram=histogram)
    return kernel.ship(arena).take()


def check_all(kernel, tensors, histogram=True):
    rows, bins = measure(kernel, tensors, histogram)
    for i, tensor in enumerate(tensors):
        check(rows[i], bins[i], on_host(tensor), histogram)


def special_values(dtype) -> dict[str, torch.Tensor]:
    inf, nan = float("inf"), float("nan")
    tiny = torch.finfo(dtype).smallest_normal
    values = {
        "empty": torch.zeros(0),
        "one": torch.tensor([0.3]),
        "zero-dimensional": torch.tensor(-2.5),
        "nan": torch.tensor([nan, 1.0, -2.0]),
        "only nan": torch.tensor([nan] * 5),
        "infinities": torch.tensor([inf, -inf, inf, 0.5]),
        "only infinity": torch.tensor([inf]),
        "denormals": torch.tensor([tiny / 2, -tiny / 4, tiny, 3 * tiny], dtype=torch.float64),
        "zeros": torch.zeros(1000),
        "signed zeros": torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0]),
        "constant": torch.full((70_001,), 0.7),
        "powers of two": torch.tensor([2.0**k for k in range(-60, 30)] + [-(2.0**k) for k in range(-60, 30)]),
        "ones": torch.tensor([1.0, -1.0, 0.9999, 1.0001] * 300),
        "near 1000": 1000 + 0.01 * torch.randn(100_003, dtype=torch.float64),
        "wrong sample": torch.cat((torch.zeros(4096), 100 + torch.randn(60_000))),
        "nan far in": torch.cat((torch.randn(50_000), torch.tensor([nan, inf]), torch.randn(50_000))),
        "ramp": torch.linspace(-3, 400, 200_000),
        "half zeros": torch.relu(torch.randn(123_457)),
    }
    if dtype in WIDE_RANGE:
        values |= {
            "1e38": 1e38 * (1 + torch.rand(20_000, dtype=torch.float64)),
            "1e-38": 1e-38 * torch.randn(20_000, dtype=torch.float64),
            "1e20": 1e20 * torch.randn(20_000, dtype=torch.float64),
            "1e-20": 1e-20 * torch.randn(20_000, dtype=torch.float64),
            "1e-44": 1e-44 * torch.arange(-300, 300, dtype=torch.float64),
            "mixed": torch.tensor([1e38, -1e38, 1e-38, 1.0, 0.0], dtype=torch.float64).repeat(777),
        }
    return {name: value.to(dtype) for name, value in values.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("histogram", [True, False])
def test_special_values(kernel, dtype, histogram):
    torch.manual_seed(1)
    for name, value in special_values(dtype).items():
        try:
            check_all(kernel, [value.cuda()], histogram)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    check_all(kernel, [value.cuda() for value in special_values(dtype).values()], histogram)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes_around_every_boundary(kernel, dtype):
    torch.manual_seed(2)
    sizes = [1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 63, 65, 127, 255, 257, 1023, 1025, 4095, 4097, 16383, 16384, 16385]
    sizes += [32767, 32769, 49153, 100_000, 1_000_003]
    check_all(kernel, [torch.randn(size, device="cuda").to(dtype) for size in sizes])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_misaligned_views(kernel, dtype):
    base = torch.randn(70_000, device="cuda").to(dtype)
    views = [base[offset : offset + size] for offset in range(18) for size in (1, 3, 40, 20_001)]
    check_all(kernel, views)
    for view in views[:8]:
        check_all(kernel, [view])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(kernel, dtype):
    base = torch.randn(6, 8, 10, 12, device="cuda").to(dtype)
    odd = [
        base[:, ::2],
        base.transpose(1, 3),
        base[0, 0].t(),
        base.contiguous(memory_format=torch.channels_last),
        base[:1, :, :1, :1].expand(5, 8, 4, 7),
        base[1:4, 2:5, :, 3],
        torch.empty(0, 3, device="cuda").to(dtype),
    ]
    check_all(kernel, odd)
    for tensor in odd:
        check_all(kernel, [tensor])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_unusual_tensors(kernel):
    indices = torch.tensor([[0, 2, 2]], device="cuda")
    sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 4, device="cuda"), (5, 4))
    z = torch.randn(100, dtype=torch.complex64, device="cuda")
    tensors = [
        torch.arange(-50, 50, device="cuda"),
        torch.tensor([True, False, True], device="cuda"),
        z.conj().imag,
        torch.nn.Parameter(torch.randn(10, 10, device="cuda")),
        sparse,
    ]
    arena = kernel.arena(8)
    kernel.measure([*tensors, z, torch.randn(3), torch.empty(3, device="meta")], range(8), arena)
    rows, bins = kernel.ship(arena).take()
    for i, tensor in enumerate(tensors[:4]):
        check(rows[i], bins[i], on_host(tensor))
    check(rows[4], bins[4], on_host(sparse.to_dense()))
    check(rows[5], bins[5], torch.view_as_real(z).double().cpu().numpy())
    assert not rows[6:].any(), "tensors that are not on the device are left out"


def test_two_thousand_tiny_tensors(kernel):
    torch.manual_seed(3)
    tensors = [torch.randn(1 + i % 1500, device="cuda") for i in range(2000)]
    check_all(kernel, tensors)


def test_dtypes_can_be_mixed(kernel):
    check_all(kernel, [torch.randn(5000, device="cuda").to(DTYPES[i % len(DTYPES)]) for i in range(60)])


def test_measuring_merges_into_the_row(kernel):
    torch.manual_seed(4)
    parts = [torch.randn(n, device="cuda") + n for n in (3, 50_000, 0, 200_000)]
    arena = kernel.arena(3)
    for part in parts:
        kernel.measure([part], [1], arena)
    kernel.measure(parts, [2, 2, 2, 2], arena)
    rows, bins = kernel.ship(arena).take()
    want, want_bins = oracle(np.concatenate([on_host(part) for part in parts]))
    want[0] = 4
    check(rows[1], bins[1], None, expected=(want, want_bins))
    check(rows[2], bins[2], None, expected=(want, want_bins))
    assert not rows[0].any()


def test_results_do_not_depend_on_timing(kernel):
    tensor = torch.randn(3_000_000, device="cuda")
    first, _ = measure(kernel, [tensor])
    for _ in range(5):
        again, _ = measure(kernel, [tensor])
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("histogram", [True, False])
def test_change(kernel, dtype, histogram):
    torch.manual_seed(5)
    tensors = [torch.randn(n, device="cuda").to(dtype) for n in (1, 3, 1000, 4097, 200_001)]
    tensors.append(torch.randn(64, 50, device="cuda").to(dtype).t())
    tensors.append(torch.randn(5001, device="cuda").to(dtype)[1:])
    tensors.append(torch.randn(7, 6, device="cuda").to(dtype)[:, ::2])
    tensors.append(torch.tensor([1.0, float("nan"), float("inf"), 0.0], device="cuda").to(dtype))
    shadows = [(t.float() * 0.9).to(dtype) for t in tensors]
    shadows[2] = torch.cat((shadows[2][:1], shadows[2]))[1:]  # lies otherwise than its tensor
    before = [on_host(shadow) for shadow in shadows]
    count = len(tensors)
    arena = kernel.arena(2 * count)
    kernel.measure_change(tensors, shadows, range(count), range(count, 2 * count), arena, histogram=histogram)
    rows, bins = kernel.ship(arena).take()
    narrow = np.float64 if dtype == torch.float64 else np.float32
    with np.errstate(invalid="ignore"):
        for i, tensor in enumerate(tensors):
            now = on_host(tensor)
            check(rows[i], bins[i], now, histogram)
            check(rows[count + i], bins[count + i], now.astype(narrow) - before[i].astype(narrow), histogram)
            assert bits(shadows[i]).equal(bits(tensor))


def test_change_that_is_measured_often_accumulates(kernel):
    tensor, shadow = torch.randn(40_000, device="cuda"), torch.zeros(40_000, device="cuda")
    arena = kernel.arena(2)
    moved = []
    for _ in range(3):
        moved.append(on_host(tensor) - on_host(shadow))
        kernel.measure_change([tensor], [shadow], [0], [1], arena)
        tensor = tensor + 0.125
    rows, bins = kernel.ship(arena).take()
    want, want_bins = oracle(np.concatenate(moved).astype(np.float32))
    want[0] = 3
    check(rows[1], bins[1], None, expected=(want, want_bins))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits(kernel):
    kernel.warm_up()
    parameters = [torch.randn(100, 100, device="cuda") for _ in range(20)] + [torch.randn(8, 6, device="cuda")[:, ::2]]
    shadows = [torch.zeros_like(p) for p in parameters]
    arena = kernel.arena(50)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        kernel.measure(parameters, range(21), arena)
        kernel.measure_one(parameters[0], 25, arena)
        kernel.measure_change(parameters, shadows, range(21), range(21, 42), arena)
        shipment = kernel.ship(arena)
        arena.reset()
        assert not shipment.ready(), "the device is still asleep, so somebody waited for it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows, _ = shipment.take()
    assert shipment.ready()
    assert rows[:42, schema.SEEN].tolist() == [2.0] * 21 + [1.0] * 4 + [2.0] + [1.0] * 16
    assert not kernel.ship(arena).take()[0].any(), "reset after shipping empties the arena"


def test_streams_take_turns(kernel):
    arena = kernel.arena(1)
    streams = [torch.cuda.Stream() for _ in range(3)]
    parts = [torch.randn(400_000, device="cuda") for _ in range(12)]
    torch.cuda.synchronize()
    for i, part in enumerate(parts):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(1_000_000 * (3 - i % 3))
            kernel.measure([part], [0], arena)
    rows, bins = kernel.ship(arena).take()
    want, want_bins = oracle(np.concatenate([on_host(part) for part in parts]))
    want[0] = 12
    check(rows[0], bins[0], None, expected=(want, want_bins))


def test_a_fresh_thread_can_measure(kernel):
    tensor = torch.randn(1000, device="cuda")
    arena = kernel.arena(1)
    done = []
    thread = threading.Thread(target=lambda: done.append(kernel.measure_one(tensor, 0, arena)))
    thread.start()
    thread.join()
    assert done == [True]
    rows, bins = kernel.ship(arena).take()
    check(rows[0], bins[0], on_host(tensor))


def test_a_graph_capture_is_left_alone(kernel):
    tensor = torch.randn(1000, device="cuda")
    arena = kernel.arena(1)
    skipped = kernel.skipped
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = tensor * 2
        assert kernel.measure_one(doubled, 0, arena) is False
    graph.replay()
    assert kernel.skipped == skipped + 1
    assert not kernel.ship(arena).take()[0].any()


def test_rows_beyond_the_arena_are_refused(kernel):
    arena = kernel.arena(2)
    tensor = torch.randn(10, device="cuda")
    for rows in ([2], [-1], [0, 2]):
        with pytest.raises(IndexError):
            kernel.measure([tensor] * len(rows), rows, arena)


def test_tensors_are_not_altered(kernel):
    tensor = torch.randn(10_000, device="cuda", requires_grad=True)
    before, version = tensor.detach().clone(), tensor._version
    measure(kernel, [tensor])
    assert tensor.detach().equal(before)
    assert tensor._version == version


def test_compiled_code_is_kept_on_disk(tmp_path, monkeypatch):
    from sonde.stats.cuda.native import NativeKernel

    monkeypatch.setenv("SONDE_CACHE", str(tmp_path))
    NativeKernel(0)
    kept = list((tmp_path / "cuda").iterdir())
    assert len(kept) == 1
    kept[0].write_bytes(kept[0].read_bytes()[:-7])
    check_all(NativeKernel(0), [torch.randn(1000, device="cuda")])
    monkeypatch.setenv("SONDE_CACHE", "/proc/nowhere")
    check_all(NativeKernel(0), [torch.randn(1000, device="cuda")])


def large_summary(tensor, piece=1 << 26):
    """Sum up on the device in float64, piece by piece: an oracle for what takes too long on the host."""
    flat, parts = tensor.view(-1), []
    for start in range(0, flat.numel(), piece):
        x = flat[start : start + piece].double()
        exponents = torch.frexp(x.abs().clamp(2.0**-47, 2.0**16)).exponent - 1 + 47
        bins = torch.bincount(exponents[x != 0].long(), minlength=schema.NUM_BINS)
        parts.append((x.sum(), x.square().sum(), x.abs().sum(), x.min(), x.max(), (x == 0).sum(), bins))
    sums, squares, sizes, lows, highs, zeros, bins = (torch.stack(each) for each in zip(*parts, strict=True))
    count = flat.numel()
    mean = sums.sum() / count
    return {
        schema.COUNT: count,
        schema.ZERO: zeros.sum().item(),
        schema.MIN: lows.min().item(),
        schema.MAX: highs.max().item(),
        schema.MEAN: mean.item(),
        schema.M2: (squares.sum() - count * mean.square()).item(),
        schema.ABS_SUM: sizes.sum().item(),
    }, bins.sum(0).cpu().numpy()


@pytest.mark.parametrize(
    ("dtype", "elements"),
    [
        (torch.float32, 50_000_017),
        (torch.bfloat16, 50_000_017),
        (torch.float32, 1 << 30),
        (torch.bfloat16, (1 << 31) + 12_345),
    ],
)
def test_tensors_of_many_chunks(kernel, dtype, elements):
    """More partial rows than a block has threads, chunks of all sizes, and more elements than 32 bits count."""
    if torch.cuda.mem_get_info()[0] < 12 * elements:
        pytest.skip("needs more memory than this device has free")
    torch.manual_seed(0)
    tensor = torch.empty(elements, dtype=dtype, device="cuda").normal_(0.01, 0.02)
    tensor[::1000] = 0
    tensor[-1] = -3.0
    expected, bins = large_summary(tensor)
    arena = kernel.arena(3)
    kernel.measure_one(tensor, 0, arena)
    kernel.measure([tensor, tensor[:5]], [1, 2], arena)
    rows, counts = kernel.ship(arena).take()
    for row in (0, 1):
        for column in (schema.COUNT, schema.ZERO, schema.MIN, schema.MAX):
            assert rows[row, column] == expected[column]
        np.testing.assert_array_equal(counts[row], bins)
        mean_magnitude = expected[schema.ABS_SUM] / elements
        assert abs(rows[row, schema.MEAN] - expected[schema.MEAN]) <= MEAN_BOUND * mean_magnitude
        assert rows[row, schema.M2] == pytest.approx(expected[schema.M2], rel=M2_BOUND)
        assert rows[row, schema.ABS_SUM] == pytest.approx(expected[schema.ABS_SUM], rel=ABS_SUM_BOUND)


def test_an_outlier_in_the_first_place(kernel):
    tensor = torch.full((40_000,), 0.37, device="cuda")
    tensor[0], tensor[7] = 1e6, float("nan")
    arena = kernel.arena(3)
    kernel.measure_one(tensor, 0, arena)
    kernel.measure_change([tensor], [torch.zeros_like(tensor)], [1], [2], arena)
    rows, _ = kernel.ship(arena).take()
    finite = tensor[tensor.isfinite()].double()
    for row in range(3):
        assert abs(rows[row, schema.MEAN] - finite.mean().item()) <= MEAN_BOUND * finite.abs().mean().item()
        squares = (finite - finite.mean()).square().sum().item()
        assert rows[row, schema.M2] == pytest.approx(squares, rel=M2_BOUND)


def test_a_kernel_that_cannot_run_is_refused(monkeypatch):
    from sonde.stats.cuda import choose

    made = cuda_kernel("cuda")
    monkeypatch.setattr(choose, "NativeKernel", lambda index: (_ for _ in ()).throw(RuntimeError("too old")))
    with pytest.raises(NoDeviceKernel, match=r"RuntimeError: too old"):
        choose._make(made.index)
    monkeypatch.setattr(choose, "NativeKernel", lambda index: made)
    monkeypatch.setattr(made, "check", lambda: (_ for _ in ()).throw(RuntimeError("no such instruction")))
    with pytest.raises(NoDeviceKernel, match=r"no such instruction"):
        choose._make(made.index)
