"""Every number against a slow, obvious one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sonde.probes import brief_statistics, channel_axis, downsample, pooled_features, sample_statistics


def oracle(sample: torch.Tensor) -> dict[str, float | None]:
    values = sample.double().flatten()
    finite = values[values.isfinite()]
    n, total = len(finite), len(values)
    return {
        "mean": float(finite.mean()) if n else None,
        "std": float(finite.std()) if n > 1 else None,
        "min": float(finite.min()) if n else None,
        "max": float(finite.max()) if n else None,
        "l1_norm": float(finite.abs().mean()) if n else None,
        "abs_sum": float(finite.abs().sum()),
        "l2_norm": float(finite.norm()) if n else 0.0,
        "abs_mean": float(finite.abs().mean()) if n else None,
        "sparsity": float((finite == 0).sum()) / total if total else None,
        "positive_ratio": float((finite > 0).sum()) / total if total else None,
        "saturation_low": float((finite <= -1).sum()) / total if total else None,
        "saturation_high": float((finite >= 1).sum()) / total if total else None,
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
    }


def with_bad_values(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.flatten()[::7] = math.nan
    tensor.flatten()[3::11] = math.inf
    tensor.flatten()[5::13] = -math.inf
    return tensor


CASES = {
    "maps": torch.randn(3, 4, 5, 6) * 2,
    "tokens": torch.randn(3, 7, 8),
    "vectors": torch.randn(4, 9),
    "volumes": torch.randn(2, 3, 4, 5, 6),
    "large mean": torch.randn(2, 3, 8, 8) + 1e4,
    "zeros": torch.relu(torch.randn(2, 3, 8, 8)),
    "one element": torch.randn(2, 1, 1, 1),
    "a number each": torch.randn(5),
    "a single number": torch.tensor(2.5),
    "whole numbers": torch.randint(-3, 4, (2, 3, 4, 4)),
    "yes and no": torch.rand(2, 5, 6) > 0.5,
    "bfloat16": torch.randn(2, 3, 8, 8).bfloat16(),
    "float64": torch.randn(2, 3, 8, 8, dtype=torch.float64),
    "bad values": with_bad_values(torch.randn(2, 3, 8, 8)),
    "bad tokens": with_bad_values(torch.randn(2, 9, 8)),
    "nothing finite": torch.full((2, 3, 4), math.nan),
    "no places": torch.randn(2, 3, 0, 4),
    "no samples": torch.randn(0, 3, 4, 4),
    "not contiguous": torch.randn(4, 6, 5, 3).permute(3, 0, 2, 1),
}


@pytest.mark.parametrize("tensor", CASES.values(), ids=CASES.keys())
def test_sample_statistics_agree_with_plain_ones(tensor):
    found = sample_statistics(tensor)
    samples = tensor if tensor.dim() else tensor.reshape(1)
    assert len(found) == len(samples)
    for stats, sample in zip(found, samples, strict=True):
        check(stats, oracle(sample))


@pytest.mark.parametrize("tensor", CASES.values(), ids=CASES.keys())
def test_brief_statistics_agree_with_plain_ones(tensor):
    found = brief_statistics(tensor)
    samples = tensor if tensor.dim() else tensor.reshape(1)
    assert len(found) == len(samples)
    for stats, sample in zip(found, samples, strict=True):
        expected = oracle(sample)
        check(stats, {name: expected[name] for name in ("mean", "std", "min", "max")})
        assert stats["shape"] == ([1, *tensor.shape[1:]] if tensor.dim() else [])


def check(stats, expected):
    for name, number in expected.items():
        if number is None:
            assert stats[name] is None, name
        else:
            assert stats[name] == pytest.approx(number, rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize(
    ("module", "tensor", "dims"),
    [
        (nn.Conv2d(3, 4, 1), torch.randn(2, 4, 5, 6), (1, 2)),
        (nn.Conv1d(3, 4, 1), torch.randn(2, 4, 6), (1,)),
        (nn.Linear(3, 8), torch.randn(2, 5, 8), (0,)),
        (nn.LayerNorm(8), torch.randn(2, 4, 5, 8), (0, 1)),
        (None, torch.randn(2, 5, 8), (0,)),
    ],
    ids=["maps", "signals", "tokens", "maps with channels last", "tokens by default"],
)
def test_channel_statistics_are_of_channels(module, tensor, dims):
    for stats, sample in zip(sample_statistics(tensor, module), tensor.double(), strict=True):
        assert stats["channel_means"].tolist() == pytest.approx(sample.mean(dims).tolist(), rel=1e-5, abs=1e-6)
        assert stats["channel_stds"].tolist() == pytest.approx(sample.std(dims).tolist(), rel=1e-5, abs=1e-6)


def test_a_channel_that_is_not_finite_has_no_mean():
    tensor = torch.ones(1, 2, 3)
    tensor[0, :, 0] = math.nan
    (stats,) = sample_statistics(tensor)
    assert math.isnan(stats["channel_means"][0])
    assert stats["channel_means"][1:].tolist() == [1.0, 1.0]


def test_the_axis_of_channels_is_found_from_the_layers_inside():
    assert channel_axis(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), torch.ones(2, 3, 6)) == 2
    assert channel_axis(nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU()), torch.ones(2, 6, 3, 3)) == 1
    assert channel_axis(nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()), torch.ones(2, 6, 9)) == 1
    assert channel_axis(nn.ReLU(), torch.ones(2, 3, 4, 4)) == 1
    assert channel_axis(nn.ReLU(), torch.ones(2)) is None


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 3, 9, 7), (2, 8, 8)])
def test_downsampling_is_average_pooling_where_that_works(shape):
    tensor = torch.randn(shape)
    pooled = nn.functional.avg_pool2d(tensor, 2)
    torch.testing.assert_close(downsample(tensor, 2), pooled)


@pytest.mark.parametrize(
    ("shape", "module", "expected"),
    [
        ((2, 3, 2, 2), None, (2, 3, 1, 1)),
        ((2, 3, 9, 2), None, (2, 3, 2, 1)),
        ((2, 3, 8, 8, 8), None, (2, 3, 2, 2, 2)),
        ((2, 3, 8, 8, 4, 4), None, (2, 3, 2, 2, 1, 1)),
        ((2, 9, 6), nn.Linear(3, 6), (2, 2, 6)),
        ((2, 6, 9), nn.Conv1d(3, 6, 1), (2, 6, 2)),
        ((2, 9), None, (2, 9)),
        ((2,), None, (2,)),
        ((), None, ()),
        ((2, 3, 0, 4), None, (2, 3, 0, 4)),
    ],
)
def test_downsampling_takes_any_rank_and_maps_smaller_than_the_factor(shape, module, expected):
    assert downsample(torch.randn(shape), 4, module).shape == expected


def test_downsampling_takes_whole_numbers_and_booleans():
    assert downsample(torch.ones(1, 1, 4, 4, dtype=torch.int32), 2).tolist() == [[[[1.0, 1.0], [1.0, 1.0]]]]
    assert downsample(torch.ones(1, 1, 4, 4, dtype=torch.bool), 4).item() == 1.0


def test_features_are_means_over_places_or_one_token():
    maps, tokens, vectors = torch.randn(2, 3, 4, 5), torch.randn(2, 7, 6), torch.randn(2, 6)
    torch.testing.assert_close(pooled_features(maps), maps.mean((2, 3)))
    torch.testing.assert_close(pooled_features(tokens), tokens.mean(1))
    torch.testing.assert_close(pooled_features(tokens, token=0), tokens[:, 0])
    assert pooled_features(vectors) is vectors
