"""Scores count what they say they count, and the other tools' rules hold at their published thresholds."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_programs.registry import Program
from peers import PeerRule as Rule
from peers import (
    Tape,
    all_zero,
    autotrainer_vanish,
    exploding_tensor,
    loss_not_decreasing,
    opinions,
    saturated_activation,
    unchanged_tensor,
    update_ratio_large,
    vanishing_gradient,
)
from scoring import Said, Verdict, by_set, quantile, score

from sonde.records import Block, Site, summarise


def program(**about):
    plain = {"name": "made", "train": lambda: 0.0, "arch": "mlp", "task": "none", "well": 0.0, "ill": 1.0}
    return Program(**{**plain, "kind": "lr_too_high", "sites": ("optimizer",), "onset": 5, **about})


def verdict(*said, fixed=False, **about):
    return Verdict(program=program(**about), fixed=fixed, said=tuple(said))


def test_the_first_cause_counts_more_than_the_third():
    first = verdict(Said("lr_too_high", ("optimizer",), 9), Said("dead_relu"))
    third = verdict(Said("dead_relu"), Said("double_step"), Said("lr_too_high", ("fc1",), 25))
    fourth = verdict(*(Said(f"other{n}") for n in range(3)), Said("lr_too_high"))
    figures = score([first, third, fourth, verdict()])
    assert (figures.top1, figures.top3, figures.named, figures.alarms) == (0.25, 0.5, 0.75, 0.75)
    assert figures.located == 0.25
    assert figures.latency == {"exact": (4, 20)}


def test_each_hold_out_is_summed_up_by_itself():
    tuned, first = verdict(Said("lr_too_high")), verdict(set="holdout_1")
    second = verdict(set="holdout_2")
    sets = by_set([second, first, tuned])
    assert sets == {"dev": [tuned], "holdout_1": [first], "holdout_2": [second]}
    assert list(sets) == ["dev", "holdout_1", "holdout_2"]


def test_an_equivalent_cause_is_right_and_a_symptom_is_not():
    assert verdict(Said("bad_init_scale"), also=("bad_init_scale",)).hit(among=1)
    symptom = verdict(Said("dead_relu"), cascade=("dead_relu",))
    assert symptom.hit() is None
    assert symptom.expected_only


def test_alarms_on_twins_and_healthy_programs_are_false():
    twin = verdict(Said("dead_relu"), fixed=True)
    healthy = verdict(fixed=True, kind=None)
    figures = score([twin, healthy])
    assert (figures.faults, figures.clean, figures.clean_alarms) == (0, 2, 0.5)
    assert math.isnan(figures.top1)


def test_precision_counts_what_is_beside_the_point():
    right, spurious = Said("lr_too_high"), Said("double_step")
    assert score([verdict(right), verdict(right, spurious), verdict(spurious, fixed=True)]).precision == 0.5


def test_a_place_is_met_from_inside_only():
    assert verdict(Said("lr_too_high", ("encoder.0.weight",)), sites=("encoder",)).located
    assert verdict(Said("lr_too_high", ("fc2.weight",)), sites=("fc",)).located
    assert not verdict(Said("lr_too_high", ("encoder",)), sites=("encoder.0",)).located
    assert not verdict(Said("lr_too_high", ("encoders",)), sites=("encoder",)).located
    assert verdict(Said("lr_too_high"), sites=()).located is None


def test_quantiles_are_values_that_occurred():
    assert quantile([5], 0.9) == 5
    assert quantile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
    assert math.isnan(quantile([], 0.5))


def tape_of(*series):
    """Make a tape from (name, quantity, kind, shape, one array of values per step)."""
    tape = Tape()
    sites = [
        Site(id=number, name=name, quantity=quantity, kind=kind, shape=shape)
        for number, (name, quantity, kind, shape, _) in enumerate(series)
    ]
    tape.take_sites(sites)
    for step in range(1, max(len(values) for *_, values in series) + 1):
        read = [(number, values[step - 1]) for number, (*_, values) in enumerate(series) if len(values) >= step]
        rows, bins = zip(*(summarise(np.asarray(value, dtype=float)) for _, value in read), strict=True)
        tape.take_block(
            Block(
                step=step,
                time=0.0,
                sites=np.array([number for number, _ in read], dtype=np.uint32),
                rows=np.stack(rows),
                bins=np.stack(bins),
                binned=np.ones(len(read), dtype=bool),
            )
        )
    return tape


def weight(values, quantity="gradient", name="fc.weight"):
    return (name, quantity, "Linear", (2, 2), values)


def test_sagemaker_rules_hold_at_their_thresholds():
    assert vanishing_gradient(tape_of(weight([[1e-6, 1e-6], [-0.9e-7, 0.9e-7]]))) == 2
    assert vanishing_gradient(tape_of(weight([[1e-6, -1e-6]]))) is None
    assert exploding_tensor(tape_of(weight([[1.0, 2.0], [1.0, math.inf]]))) == 2
    assert exploding_tensor(tape_of(weight([[1.0, 1e30]]))) is None
    assert all_zero(tape_of(weight([[0.0, 1.0], [0.0, 0.0]]))) == 2
    tanh = ("act", "output", "Tanh", (1, 4), [torch.tanh(torch.tensor([0.1, 9.6, 9.6, -9.6]))])
    assert saturated_activation(tape_of(tanh)) == 1
    mild = ("act", "output", "Tanh", (1, 4), [np.tanh([0.1, 5.0, 5.0, -5.0])])
    assert saturated_activation(tape_of(mild)) is None
    low = ("act", "output", "Sigmoid", (1, 2), [1 / (1 + np.exp([24.0, 23.5]))])
    assert saturated_activation(tape_of(low)) == 1


def test_ratios_of_updates_to_weights_are_those_of_the_same_step():
    still = [weight([[3.0, 4.0]] * 4, "parameter"), weight([[0.0, 0.0]] * 4, "update")]
    assert unchanged_tensor(tape_of(*still)) == 3
    wild = [weight([[3.0, 4.0]] * 2, "parameter"), weight([[3.0, 4.0], [31.0, 41.0]], "update")]
    assert update_ratio_large(tape_of(*wild)) == 2


def test_a_loss_that_falls_is_not_an_alarm():
    falling = [[1.0 / (step + 1)] for step in range(40)]
    assert loss_not_decreasing(tape_of(("loss", "scalar", "", (), falling))) is None
    assert loss_not_decreasing(tape_of(("loss", "scalar", "", (), [[0.7]] * 40))) == 20


def test_autotrainer_waits_and_is_content_with_a_falling_loss():
    first, last = weight([[1e-6]] * 60, name="a.weight"), weight([[1.0]] * 60, name="b.weight")
    flat, falling = ([[1.0]] * 60, [[1.0 / (step + 1)] for step in range(60)])
    assert autotrainer_vanish(tape_of(first, last, ("loss", "scalar", "", (), flat))) == 20
    assert autotrainer_vanish(tape_of(first, last, ("loss", "scalar", "", (), falling))) is None


def test_opinions_come_in_the_order_of_their_steps_and_mean_what_they_may_mean():
    rules = (Rule("late", lambda _: 9, ("dead_relu",)), Rule("early", lambda _: 2), Rule("silent", lambda _: None))
    said = opinions(rules, Tape(), ("dead_relu",))
    assert said == (Said("early", (), 2), Said("dead_relu", (), 9))


@pytest.fixture
def bench():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"
    return runpy.run_path(str(path))["main"]


def test_the_benchmark_scores_a_program_and_its_twin(bench, capsys):
    bench(["--only", "steps_on_a_copy", "--json"])
    reply = json.loads(capsys.readouterr().out)
    ours = [each for each in reply["verdicts"] if each["tool"] == "Sonde"]
    assert [each["repaired"] for each in ours] == [False, True]
    assert reply["scores"]["Sonde"]["faults"] == 1
    assert reply["scores"]["AutoTrainer"]["clean"] == 1


def test_the_benchmark_prints_tables_that_fit(bench, capsys):
    bench(["--only", "broadcasts_the_target", "--bare"])
    reply = capsys.readouterr().out
    assert "broadcast_loss" in reply
    assert "cause ranked first" in reply
    assert max(len(line) for line in reply.splitlines()) <= 110


def test_a_stopped_benchmark_keeps_its_verdicts_and_goes_on(bench, capsys, tmp_path):
    kept = tmp_path / "faults.jsonl"
    arguments = ["--only", "steps_on_a_copy", "--no-peers", "--json", "--out", str(kept)]
    bench(arguments)
    whole = json.loads(capsys.readouterr().out)
    first, second = kept.read_text().splitlines()
    assert [json.loads(first), json.loads(second)] == whole["verdicts"]

    kept.write_text(first + "\n" + second[:20])
    bench([*arguments, "--resume"])
    resumed = json.loads(capsys.readouterr().out)
    assert [each["repaired"] for each in resumed["verdicts"]] == [False, True]
    assert kept.read_text().splitlines()[0] == first
    assert resumed["scores"]["Sonde"]["top1"] == whole["scores"]["Sonde"]["top1"]


def test_an_unknown_name_is_refused(bench):
    with pytest.raises(SystemExit, match="no program is called 'nobody'"):
        bench(["--only", "nobody"])
