import numpy as np
import pytest

from sonde.analysis.contrast import Feature, adjust, cohens_d, contrast, feature_matrix, rank_test, separate
from sonde.errors import OptionError
from sonde.store import BatchValue, DebugOutputs, PageWriter

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize(("n", "m", "ties"), [(30, 270, False), (12, 9, True), (3, 400, True), (2, 2, False)])
def test_ranks_agree_with_scipy(n, m, ties):
    random = np.random.default_rng(n + m)
    first, second = random.normal(0.3, 1, (n, 40)), random.normal(0, 1, (m, 40))
    if ties:
        first, second = first.round(1), second.round(1)
    effect, p = rank_test(first, second)
    expected = stats.mannwhitneyu(first, second, method="asymptotic")
    np.testing.assert_allclose(p, expected.pvalue, rtol=1e-9)
    np.testing.assert_allclose(effect, 2 * expected.statistic / (n * m) - 1, atol=1e-12)


def test_corrected_p_values_agree_with_scipy():
    p = np.random.default_rng(0).uniform(size=200) ** 2
    np.testing.assert_allclose(adjust(p), stats.false_discovery_control(p), rtol=1e-12)


def test_cohens_d_is_the_difference_in_pooled_deviations():
    first, second = np.array([[1.0], [2.0], [3.0]]), np.array([[5.0], [7.0]])
    assert cohens_d(first, second)[0] == pytest.approx((2 - 6) / np.sqrt((2 * 1 + 1 * 2) / 3))


def test_without_a_difference_almost_nothing_is_distinguished():
    values = np.random.default_rng(3).normal(size=(300, 500))
    found = separate([Feature("d", "x", "value", i) for i in range(500)], values[:40], values[40:])
    assert sum(each.q < 0.05 for each in found) <= 1


def write(folder, samples):
    with PageWriter(folder, page_bytes=1 << 16) as pages:
        for sample, outputs in samples.items():
            pages.add(sample, outputs)
    return DebugOutputs(folder)


def make(random, failed):
    features = random.normal(size=(1, 6, 4, 4)).astype(np.float32)
    features[0, 4] += 2.0 * failed
    return {
        "features": {"map": features, "layer": "conv"},
        "numbers": {"share": float(random.normal()), "means": [float(each) for each in random.normal(size=3)]},
        "tokens": random.normal(size=(1, 5, 2)),
        "constant": np.ones((3, 3)),
    }


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    random = np.random.default_rng(7)
    return write(tmp_path_factory.mktemp("pages") / "debugger", {idx: make(random, idx < 20) for idx in range(120)})


def test_the_channel_that_differs_is_found_first(outputs):
    found = contrast(outputs, range(20), range(20, 120))
    first = found.separations[0]
    assert (first.feature.debugger, first.feature.path, first.feature.channel) == ("features", "map", 4)
    assert first.q < 1e-6
    assert first.effect > 0.9
    assert first.failed_median > first.good_median
    assert not found.is_rough
    assert "channel 4" in first.feature.words
    assert not any(each.feature.debugger == "constant" for each in found.separations)


def test_the_statistics_are_those_of_numpy(outputs):
    features, values = feature_matrix(outputs, [3, 50])
    by_name = {
        (each.debugger, each.path, each.statistic, each.channel): values[1, at] for at, each in enumerate(features)
    }
    array = outputs[50]["features"]["map"].astype(np.float64)[0]
    assert by_name["features", "map", "mean", None] == pytest.approx(array.mean())
    assert by_name["features", "map", "max", 2] == array[2].max()
    assert by_name["tokens", "", "mean", 1] == pytest.approx(outputs[50]["tokens"][0, :, 1].mean())
    assert by_name["numbers", "means", "value", 2] == outputs[50]["numbers"]["means"][2]
    assert by_name["numbers", "share", "value", None] == outputs[50]["numbers"]["share"]


def test_too_few_samples_are_an_error_that_says_so(outputs):
    with pytest.raises(OptionError, match="0 failed and 10 good"):
        contrast(outputs, ["none"], range(10))


def test_small_groups_are_called_rough(outputs):
    assert contrast(outputs, range(4), range(20, 60)).is_rough


def test_samples_of_other_shapes_are_left_out_and_not_mixed_up(tmp_path):
    random = np.random.default_rng(1)
    odd = {idx: {"map": random.normal(size=(1, 3 + (idx == 5), 4, 4))} for idx in range(12)}
    found = contrast(write(tmp_path / "debugger", odd), range(6), range(6, 12))
    assert found.separations == []


def test_numbers_of_whole_batches_are_left_out_and_named(tmp_path):
    def capture(idx):
        first = idx // 4 * 4
        batch = tuple(range(first, first + 4))
        # Taken for the sample's own, it would separate the groups perfectly.
        return {"mine": {"mean": BatchValue(float(idx < 8), batch), "own": float(idx)}}

    found = contrast(write(tmp_path, {idx: capture(idx) for idx in range(40)}), range(8), range(8, 40))
    assert [each.feature.path for each in found.separations] == ["own"]
    assert found.features == 1
    assert found.of_batches == ("mine/mean",)


def test_features_that_say_the_same_are_folded_and_maps_of_pixels_have_no_channels(tmp_path):
    random = np.random.default_rng(0)
    with PageWriter(tmp_path, page_bytes=1 << 20) as pages:
        for sample in range(20):
            plane = random.uniform(size=(1, 6, 6)) + (sample < 10)
            tokens = random.normal(size=(5, 3))
            pages.add(sample, {"cam": {"gradcam": plane, "stats": {"mean": float(plane.mean())}}, "tokens": tokens})
    found = contrast(DebugOutputs(tmp_path), list(range(10)), list(range(10, 20)))
    words = [each.feature.words for each in found.separations]
    assert not any("gradcam, " in each for each in words)
    assert any(each.startswith("mean of tokens, feature ") for each in words)
    first = next(each for each in found.separations if each.feature.words == "mean of cam/gradcam")
    assert [each.words for each in first.also] == ["value of cam/stats/mean"]
