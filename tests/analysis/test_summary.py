from dataclasses import replace

import numpy as np
import pytest
from tests.analysis.made_run import BROKEN, DYING, Recipe, write_run

from sonde.analysis import (
    ModelOrder,
    facts_of,
    find_learning_rate,
    find_loss,
    first_step,
    gradient_flow,
    has_stat,
    keys_of,
    read_rows,
    summarise_layers,
    summarise_sites,
    usual_stat,
    windows,
    worst_first,
)
from sonde.core import schema
from sonde.records import Site
from sonde.store import RunWriter, open_run


@pytest.fixture
def order(run):
    return ModelOrder(run.header, run.sites)


@pytest.fixture
def summaries(run):
    return summarise_sites(run, run.sites)


def test_the_broken_layer_comes_first_and_the_dying_one_second(summaries, order):
    layers = summarise_layers(summaries, order)
    assert [layer.name for layer in layers[:2]] == [BROKEN, DYING]
    assert layers[0].mark.reason == "non-finite at step 45"
    assert "faded" in layers[1].mark.reason
    assert [layer.name for layer in layers[2:5]] == ["embed", "blocks.0.attn", "blocks.0.mlp"]


def test_sites_keep_their_values_and_marks_whatever_statistic_is_shown(run, summaries):
    by_rms = {row.site.key: row for row in summaries}
    for row in summarise_sites(run, run.sites, stat="norm"):
        assert row.stat == "norm"
        assert row.mark == by_rms[row.site.key].mark
    row = by_rms["head.weight:gradient"]
    expected = run.series("head.weight:gradient", "rms").values
    assert np.array_equal(row.values, expected)
    assert (row.last, row.low, row.high) == (expected[-1], expected.min(), expected.max())
    assert row.now == np.median(expected[-20:])


def test_worst_first_ends_in_model_order(summaries, order):
    keys = [row.site.key for row in worst_first(summaries, order)]
    # The loss was NaN in one step; it is worth as much as a gradient that was.
    assert set(keys[:2]) == {f"{BROKEN}.weight:gradient", "loss:scalar"}
    fine = [row for row in worst_first(summaries, order) if row.mark.level == "fine" and row.site.quantity == "update"]
    assert [row.site.name for row in fine] == sorted((row.site.name for row in fine), key=order.of_layer)


def test_the_last_steps_are_read_when_asked(run):
    [row] = summarise_sites(run, run.find("head.weight:gradient"), last=7)
    assert row.steps.tolist() == list(range(54, 61))
    assert first_step(run, sites=1) is None
    assert first_step(run, sites=10**9) is None  # fewer steps than are read anyway
    assert first_step(run, sites=1, last=1000) is None


def test_gradient_flow_is_in_model_order_with_update_ratios(run, summaries, order):
    flow = gradient_flow(summaries, order)
    assert [row.name for row in flow] == Recipe().modules()
    first = flow[0]
    assert first.gradient == pytest.approx(2e-3, rel=0.2)
    assert first.ratio == pytest.approx(np.median(run.series("embed.weight:update", "ratio").values[-20:]))


def test_vectors_do_not_hide_in_the_flow_of_matrices(order):
    sites = [Site(id=0, name="norm.weight", quantity="gradient", shape=(8,))]
    from sonde.analysis import SiteSummary

    rows = [SiteSummary(sites[0], "rms", np.arange(3), np.ones(3), np.zeros(3))]
    assert [row.name for row in gradient_flow(rows, order)] == ["norm"]
    matrix = Site(id=1, name="fc.weight", quantity="gradient", shape=(8, 8))
    rows.append(SiteSummary(matrix, "rms", np.arange(3), np.ones(3), np.zeros(3)))
    assert [row.name for row in gradient_flow(rows, order)] == ["fc"]


def test_a_ratio_needs_its_parameter(run):
    keys = keys_of(run)
    lonely = Site(id=0, name="lonely.weight", quantity="update")
    assert usual_stat(lonely, keys) == "rms"
    assert usual_stat(run.find("embed.weight:update")[0], keys) == "ratio"
    assert not has_stat(run.find("embed:output")[0], "value", keys)
    assert has_stat(run.find("loss:scalar")[0], "value", keys)


def test_facts_of_a_run(run):
    facts = facts_of(run)
    assert (facts.name, facts.status, facts.model, facts.device) == ("first", "finished", "TinyTransformer", "cpu")
    assert (facts.num_steps, facts.first_step, facts.last_step) == (60, 1, 60)
    assert facts.describe_steps() == "60 steps"
    assert replace(facts, num_steps=20, first_step=0).describe_steps() == "60 steps, 20 recorded"
    assert facts.seconds == pytest.approx(59 * 0.05)
    assert facts.steps_per_second == pytest.approx(20.0)
    assert facts.num_parameters == 14 * 65_536
    assert facts.nbytes > 0


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["val_loss", "loss"], "loss"),
        (["accuracy", "train/loss", "val_loss"], "train/loss"),
        (["accuracy", "aux_loss"], "aux_loss"),
        (["accuracy"], None),
    ],
)
def test_the_loss_is_found_by_its_name(names, expected):
    found = find_loss([Site(id=i, name=name, quantity="scalar") for i, name in enumerate(names)])
    assert (found.name if found else None) == expected


def test_the_learning_rate_is_found(run):
    assert find_learning_rate(run.sites).name == "optimizer.group0.lr"
    assert find_learning_rate([]) is None


def test_windows_cover_every_step_once(run):
    parts = list(windows(run, size=25))
    assert parts == [(1, 26), (26, 51), (51, 61)]


def test_rows_of_a_long_table_agree_with_the_series(run):
    site = run.find("embed.weight:update")[0]
    [rows] = read_rows(run, site, ("norm", "ratio", "value"), (10, 20))
    assert len(rows) == 10
    assert np.array_equal(rows.stats["norm"], run.series(site, "norm", start=10, stop=20).values)
    assert np.array_equal(rows.stats["ratio"], run.series(site, "ratio", start=10, stop=20).values)
    assert np.isnan(rows.stats["value"]).all()
    assert np.diff(rows.times) == pytest.approx(0.05, rel=1e-4)


def test_a_run_without_steps_can_be_summarised(tmp_path):
    write_run(tmp_path / "empty", Recipe(steps=0, nan_at=None))
    run = open_run(tmp_path / "empty")
    rows = summarise_sites(run, run.sites)
    assert all(np.isnan(row.last) and np.isnan(row.low) and np.isnan(row.now) for row in rows)
    assert facts_of(run).last_step is None
    assert list(windows(run)) == []


def test_masks_and_steps_that_a_gradient_scaler_held_back_are_not_marked(tmp_path):
    recipe = Recipe(dies_at=None, nan_at=None)
    writer = RunWriter(tmp_path / "masked", recipe.run_header())
    writer.take_sites(recipe.sites())
    for block in recipe.blocks():
        for site in recipe.sites():
            if site.key == "head:output":
                block.rows[site.id, schema.NEG_INF] = 3
            if site.quantity == "gradient" and block.step == 1:
                block.rows[site.id, schema.POS_INF] = 3
        writer.take_block(replace(block, skipped=block.step == 1))
    writer.close()
    run = open_run(tmp_path / "masked")
    rows = {row.site.key: row for row in summarise_sites(run, run.sites)}
    assert {row.mark.level for row in rows.values()} == {"fine"}
    assert rows["head:output"].bad.all()
