"""What is read of many ranks equals what one process would have read of the whole model, whatever the layout."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from tests.parallel import layouts
from tests.two_ranks import backend_for
from torch import nn

import sonde
from sonde.store.ranks import read_beats

IMPORTS = "from tests.parallel import layouts"
PROGRAM = "layouts.run_layouts(folder, {names!r})"
STATISTICS = ("count", "norm", "mean", "std", "min", "max", "l1", "nonfinite", "zero", "abs_p50", "abs_p99")
SAME_AS_WHOLE = [name for name in layouts.LAYOUTS if name not in ("ddp_frozen", "fsdp2_bf16", "fsdp1_flat", "stages")]


def model_of(name):
    return "tensor_parallel" if name.endswith("tensor_parallel") else "ddp"


def whole_model(name):
    if name == "tensor_parallel":
        model = layouts.make(hidden=12)
        for block in model.blocks:
            block.norm = nn.Identity()
        return model
    return layouts.make()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Record the same training in one process, once for each model."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("ddp", "tensor_parallel"):
        layouts.train(whole_model(name), folder / name, data=layouts.whole)
    return {name: sonde.open_run(folder / model_of(name)) for name in layouts.LAYOUTS}


class Recorded(dict):
    """Runs by layout. With 4 ranks, only layouts that differ from those with 2 are trained, unless all are wanted."""

    def __missing__(self, name):
        pytest.skip("with 4 ranks only if SONDE_ALL_PROGRAMS is set")


@pytest.fixture(scope="module", params=[2, 4])
def recorded(request, run_two_ranks, tmp_path_factory):
    """Train in each layout with 2 and with 4 ranks: bit-identical with and without Sonde, or the program fails."""
    folder = tmp_path_factory.mktemp("ranks") / "runs"
    folder.mkdir()
    every = request.param == 2 or os.environ.get("SONDE_ALL_PROGRAMS")
    names = list(layouts.LAYOUTS) if every else ["ddp", "fsdp2", "hsdp", "fsdp1_original", "fsdp2_tensor_parallel"]
    backend = backend_for(request.param)
    run_two_ranks(IMPORTS, PROGRAM.format(names=names), folder, ranks=request.param, backend=backend)
    return Recorded({name: sonde.open_run(folder / name) for name in names})


def test_the_ranks_of_these_tests_talk_over_nccl(recorded):
    ranks = len(recorded["ddp"].ranks)
    if backend_for(ranks) != "nccl":
        pytest.skip(
            f"NCCL demands a GPU for each of {ranks} ranks; there are {torch.cuda.device_count()}: gloo is used"
        )
    assert {beat.device[:4] for beat in read_beats(recorded["ddp"].path).values()} == {"cuda"}


def held(run):
    return [site for site in run.sites if site.quantity in ("parameter", "gradient", "update")]


@pytest.mark.parametrize("name", SAME_AS_WHOLE)
def test_statistics_of_all_ranks_are_those_of_the_whole_model(recorded, alone, name):
    run, one = recorded[name], alone[name]
    assert {site.key for site in held(run)} == {site.key for site in held(one)}
    for site in held(one):
        assert run.site(site.key).shape == site.shape
        statistics = (*STATISTICS, "ratio") if site.quantity == "update" else STATISTICS
        for statistic in statistics:
            ours, theirs = run.series(site.key, statistic), one.series(site.key, statistic)
            assert ours.steps.tolist() == theirs.steps.tolist(), (site.key, statistic)
            np.testing.assert_allclose(ours.values, theirs.values, 1e-6, 1e-12, err_msg=f"{site.key} {statistic}")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1_original"])
def test_a_step_read_as_a_whole_agrees_with_the_curves(recorded, name):
    run = recorded[name]
    step = run.at(3)
    for site in held(run):
        norm = run.series(site, "norm", start=3, stop=4).values[0]
        assert step[site].norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("name", ["plain", "ddp", "fsdp2", "fsdp1_original", "hsdp"])
def test_outputs_are_merged_over_the_micro_batches_of_all_ranks(recorded, alone, name):
    for statistic in ("count", "mean", "norm", "max"):
        ours, theirs = (run.series("head:output", statistic).values for run in (recorded[name], alone[name]))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", ["tensor_parallel", "fsdp2_tensor_parallel"])
def test_outputs_that_ranks_compute_together_count_once_whether_copies_or_shards(recorded, alone, name):
    run, ranks = recorded[name], len(recorded[name].ranks)
    groups = 1 if name == "tensor_parallel" else ranks // 2
    held = {site: run.holdings_of(f"{site}:output") for site in ("blocks.0.up", "blocks.0", "head")}
    assert len(set(held["blocks.0.up"].values())) == ranks
    assert all("shard" in text for text in held["blocks.0.up"].values())
    assert len(set(held["head"].values())) == len(set(held["blocks.0"].values())) == groups
    for site in held:
        for statistic in ("count", "mean", "norm", "max", "abs_p50"):
            ours, theirs = (each.series(f"{site}:output", statistic).values for each in (run, alone[name]))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=f"{site} {statistic}")


def test_a_flat_parameter_has_the_elements_of_its_module_and_no_padding(recorded, alone):
    run, one = recorded["fsdp1_flat"], alone["ddp"]
    for quantity in ("parameter", "gradient", "update"):
        parts = [site for site in held(one) if site.name.startswith("blocks.0.") and site.quantity == quantity]
        flat = f"blocks.0._flat_param:{quantity}"
        assert run.series(flat, "count").values[-1] == sum(np.prod(site.shape) for site in parts)
        for statistic, combine in (("norm", np.linalg.norm), ("min", np.min), ("l1", np.sum)):
            theirs = combine([one.series(site, statistic).values for site in parts], axis=0)
            np.testing.assert_allclose(run.series(flat, statistic).values, theirs, rtol=1e-6)


def test_mixed_precision_leaves_whole_parameters(recorded, alone):
    for site in held(alone["ddp"]):
        counts = recorded["fsdp2_bf16"].series(site.key, "count").values
        assert set(counts.tolist()) == {np.prod(site.shape)}


def test_frozen_parts_have_values_and_no_gradients(recorded):
    run = recorded["ddp_frozen"]
    assert run.series("blocks.0.up.weight:parameter", "count").values.tolist() == [70.0]
    assert not any(site.key == "blocks.0.up.weight:gradient" for site in run.sites)


def test_stages_with_the_same_names_are_distinguished(recorded):
    run = recorded["stages"]
    names = {site.name for site in held(run)}
    own = [f"{layer}.{which}" for layer in (0, 2) for which in ("weight", "bias")]
    assert names == {*own, *(f"stage{number}.{name}" for number in range(1, len(run.ranks)) for name in own)}
    for number in run.ranks:
        key = f"{'' if number == 0 else f'stage{number}.'}0.weight:gradient"
        assert run.ranks_of(run.site(key)) == [number]
        assert run.series(key, "count").values.tolist() == [49.0] * layouts.STEPS


@pytest.mark.parametrize("name", list(layouts.LAYOUTS))
def test_nothing_is_found_that_one_process_does_not_show(recorded, alone, name):
    run = recorded[name]
    allowed = {finding.kind for finding in sonde.diagnose(alone[name]).findings}
    diagnosis = sonde.diagnose(run)
    assert {finding.kind for finding in diagnosis.findings} <= allowed
    assert not diagnosis.broken
    assert {finding.kind for finding in run.findings} <= allowed
    assert not [event for event in run.events if event.event_type == "fault"]
    assert sonde.verify(run.path).ok


def test_a_rank_alone_is_read_by_its_number(recorded):
    run = recorded["fsdp2"]
    counts = [run.series("head.bias:parameter", "count", rank=rank).values[-1] for rank in run.ranks]
    assert sum(counts) == 3
    assert set(run.holdings_of("head.bias:parameter").values()) == {f"shard {r}/{len(run.ranks)}" for r in run.ranks}
    assert set(recorded["ddp"].holdings_of("head.bias:parameter").values()) == {"replica"}
