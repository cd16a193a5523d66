import numpy as np
import pytest
from tests.analysis.swept_runs import RATES, accuracy, write_sweep

from sonde.analysis.sweep import differing, group_rows, layers_apart, read_row, read_troubles, usual_grouping
from sonde.store import list_runs, open_run
from sonde.store.header import Labels, write_labels


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def rows(sweep):
    return {path.name: read_row(open_run(path)) for path in sorted(sweep.iterdir())}


@pytest.fixture(scope="module")
def good(rows):
    return [row for name, row in rows.items() if name.startswith("lr")]


def test_a_row_has_the_last_and_the_best_of_each_metric_in_its_direction(rows):
    metric = rows["lr0.01-seed1"].metrics["val_acc"]
    assert metric.last == pytest.approx(accuracy(0.01, 1, 12))
    assert (metric.best, metric.best_step) == (pytest.approx(accuracy(0.01, 1, 10)), 10)
    loss = rows["lr0.01-seed1"].metrics["loss"]
    assert loss.direction == -1
    assert loss.best <= loss.last


def test_settings_that_differ_are_those_of_the_user_by_their_plain_names(good):
    assert differing(good) == ["lr", "seed"]
    assert usual_grouping(good) == ["lr"]
    assert usual_grouping(good[::2]) == []  # one run of each rate: nothing is repeated


def test_a_run_that_failed_or_ended_with_nan_is_never_calm(rows, good):
    assert (rows["failed"].troubles[0].kind, rows["failed"].severity) == ("ValueError", "critical")
    assert "train.py:7" in rows["failed"].troubles[0].cause
    assert (rows["nan"].troubles[0].kind, rows["nan"].severity) == ("loss_not_finite", "critical")
    assert np.isnan(rows["nan"].metrics["loss"].last)
    assert all(row.troubles == () for row in good)


def test_the_list_of_runs_has_the_same_troubles_as_the_rows(sweep, rows):
    for summary in list_runs(sweep):
        assert read_troubles(summary) == rows[summary.path.name].troubles


def test_groups_average_over_seeds(good):
    groups = group_rows(good, ["lr"])
    assert [group.name for group in groups] == [f"lr={rate:g}" for rate in RATES]
    middle = groups[1].last["val_acc"]
    values = [accuracy(0.01, seed, 12) for seed in (0, 1)]
    assert (middle.mean, middle.deviation) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))
    assert (middle.low, middle.high, middle.count) == (pytest.approx(values[0]), pytest.approx(values[1]), 2)


def test_a_group_with_a_nan_run_has_no_calm_mean(rows):
    group = group_rows([rows["lr0.1-seed0"], rows["nan"]], ["lr"])[0]
    assert np.isnan(group.last["loss"].mean)
    assert group.troubles == {"loss_not_finite": 1}


def test_the_layer_that_differs_between_groups_beyond_the_scatter_of_repeats_comes_first(sweep, good):
    groups = group_rows(good, ["lr"])
    layers = layers_apart([[open_run(sweep / row.name) for row in group.rows] for group in groups])
    assert layers[0].site == "head:output"
    assert layers[0].doublings == pytest.approx(np.log2(100), abs=0.3)
    assert layers[0].clearness > 3 * layers[1].clearness


def test_tags_and_a_note_are_those_of_the_file(sweep, rows):
    assert rows["failed"].labels == Labels()
    write_labels(sweep / "failed", Labels(("broken",), "shapes"))
    assert read_row(open_run(sweep / "failed")).labels == Labels(("broken",), "shapes")
    (sweep / "failed" / "labels.json").write_text("{")
    assert read_row(open_run(sweep / "failed")).labels == Labels()
    (sweep / "failed" / "labels.json").unlink()
