from pathlib import Path

import numpy as np
import pytest

from sonde.analysis.classes import by_class, changes, histogram
from sonde.analysis.embedding import embed, vector_of
from sonde.analysis.scores import Evaluation, Notes, ScoreTable


def table(losses, ids=None):
    ids = list(range(len(losses))) if ids is None else ids
    return ScoreTable(Evaluation("0", Path(), 0), ids, {"loss": np.array(losses)}, {"loss": -1}, {})


LABELS = {0: 3, 1: 3, 2: 5, 3: 5, 4: 5}
PREDICTIONS = {0: 3, 1: 5, 2: 5, 3: 5, 4: 3}


def test_classes_are_counted_by_label_and_prediction():
    found = by_class(table([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), Notes(LABELS, PREDICTIONS), "loss", np.ones(6, bool))
    assert found.confusion.tolist() == [[1, 1], [1, 2]]
    assert (found.known, found.of) == (5, 6)
    three, five = found.rows
    assert (three.label, three.count, three.recall, three.precision, three.mean) == (3, 2, 0.5, 0.5, 1.5)
    assert (five.recall, five.precision, five.mean) == (pytest.approx(2 / 3), pytest.approx(2 / 3), 4.0)


def test_only_selected_samples_count_and_none_without_predictions():
    mask = np.array([True, False, True, False, False, False])
    found = by_class(table([1.0] * 6), Notes(LABELS, PREDICTIONS), "loss", mask)
    assert found.confusion.tolist() == [[1, 0], [0, 1]]
    assert by_class(table([1.0] * 6), Notes(LABELS, {}), "loss", mask) is None


def test_a_histogram_counts_all_scores_that_are_finite():
    column = np.array([0.0, 0.1, 1.0, np.nan, np.inf])
    found = histogram(column, np.array([True, False, False, False, True]))
    assert (int(found.all.sum()), int(found.selected.sum()), found.not_finite) == (3, 1, 2)
    assert (found.edges[0], found.edges[-1]) == (0.0, 1.0)


def test_changes_between_runs_come_with_predictions_and_largest_difference_first():
    mine, theirs = table([1.0, 2.0, 9.0]), table([1.5, 2.0, 1.0], ids=[0, 1, 7])
    notes = [Notes({0: 3}, {0: 3}), Notes({0: 3}, {0: 5})]
    found = changes([mine, theirs], notes, "loss")
    assert [each.idx for each in found] == [0, 1]
    assert (found[0].label, found[0].before, found[0].after, found[0].difference) == (3, 5, 3, -0.5)


def test_pca_keeps_distances_of_points_that_lie_in_a_plane():
    random = np.random.default_rng(0)
    flat = random.normal(size=(30, 2)) @ np.linalg.qr(random.normal(size=(10, 2)))[0].T + 5.0
    placed = embed(flat)
    apart = np.linalg.norm(flat[:, None] - flat[None], axis=-1)
    assert np.linalg.norm(placed.points[:, None] - placed.points[None], axis=-1) == pytest.approx(apart, abs=1e-9)
    assert sum(placed.explained) == pytest.approx(1.0)


def test_a_feature_map_becomes_the_means_of_its_channels():
    assert vector_of(np.arange(8.0).reshape(1, 2, 2, 2)).tolist() == [1.5, 5.5]
    assert vector_of(np.array([np.nan, 1.0])).tolist() == [0.0, 1.0]


def test_umap_keeps_groups_apart_where_it_is_installed():
    pytest.importorskip("umap", reason="pip install umap-learn adds it")
    draw = np.random.default_rng(0)
    vectors = np.concatenate([draw.normal(size=(30, 8)), 20 + draw.normal(size=(30, 8))])
    points = embed(vectors, "umap").points
    between = np.linalg.norm(points[:30].mean(0) - points[30:].mean(0))
    assert between > max(np.linalg.norm(part - part.mean(0), axis=1).max() for part in (points[:30], points[30:]))
